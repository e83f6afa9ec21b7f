"""Weights in the order of their rows: floats as they are, 8-bit values, and codes of 4 or 3 bits with scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.compiling.gpu_libraries import FP8_BLOCKS
from accelpatch.kernels.layouts.layout import WeightArguments, concatenated, nbytes_of, why_not_split

FP8_BLOCK = 128  # values along K that share a scale where a row has several
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)  # in the order of the device library's form argument


def fp8_name(form: torch.dtype) -> str:
    """e4m3fn or e4m3fnuz."""
    return str(form).removeprefix("torch.float8_")


def form_name(form: torch.dtype) -> str:
    """int8, e4m3fn or e4m3fnuz."""
    return fp8_name(form).removeprefix("torch.")


R = TypeVar("R", bound="RowMajor")


@dataclass(frozen=True, eq=False)
class RowMajor:
    """w[N, K]; base of the layouts of this file. They are canonical: a state dict has them, whatever the device.
    Each iterates over its `arguments()`.

    order[K] int32: the input of each column, where columns are sorted by group (GPTQ's act-order); None: in order.
    """

    part: ClassVar[str] = "all"
    tiled: ClassVar[bool] = False
    orders: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    bits: ClassVar[int] = 8  # of a value where w holds bytes
    shared: ClassVar[tuple[str, ...]] = ("order",)  # tensors that have no entry a row
    w: Tensor
    order: Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls: type[R], parts: Mapping[str, Tensor | None], **data: Any) -> R:
        """From the tensors of a state dict by name; data: fields that are no tensors. Raises KernelError for a tensor
        that is missing or that such a weight does not have."""
        known = {one.name: one for one in fields(cls)}
        found = {("w" if name == "q" else name): one for name, one in parts.items() if one is not None}
        for name in found.keys() - known.keys():
            raise KernelError(f"{name} does not belong to this kind of weight: write the checkpoint again")
        for name, one in known.items():
            if one.default is MISSING and name not in found | data:
                raise KernelError(f"{'q' if name == 'w' else name} is missing")
        return cls(**found, **data)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in a state dict."""
        found = (("q" if name == "w" else name, value) for name, value in self._fields())
        return {name: value for name, value in found if isinstance(value, Tensor)}

    def with_tensors(self: R, tensors: Mapping[str, Tensor]) -> R:
        """A copy with other tensors, by their names in a state dict."""
        return replace(self, **{("w" if name == "q" else name): one for name, one in tensors.items()})

    def map(self: R, change: Callable[[Tensor], Tensor]) -> R:
        """A copy with each tensor changed, such as moved to a device."""
        return replace(self, **{name: change(one) for name, one in self._fields() if isinstance(one, Tensor)})

    def replace(self: R, **changes: Any) -> R:
        """A copy with other values of some fields."""
        return replace(self, **changes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arguments())

    def _fields(self) -> list[tuple[str, Any]]:
        return [(one.name, getattr(self, one.name)) for one in fields(self)]

    def canonical(self: R) -> R:
        """Itself."""
        return self

    def arguments(self) -> tuple[Any, ...]:
        """What the layout's operation takes between x and the bias."""
        return tuple(value for name, value in self._fields() if name != "order")

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return int(self.w.shape[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return int(self.w.shape[1]) * 8 // self.bits

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return type(self), *((one.dtype, one.shape[1]) if isinstance(one, Tensor) else one for one in self.arguments())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return nbytes_of((*self.arguments(), self.order))

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        """Why no fused layer of a GPU computes with it for x of `dtype`; None where one can."""
        return f"its weight is {type(self).__name__}, which no fused layer reads"

    def launch(self) -> WeightArguments:
        """The arguments of a launch of the device library. Raises KernelError for a layout that it does not read."""
        raise KernelError(f"the device library reads no {type(self).__name__}")

    @staticmethod
    def why_not_concat(parts: Sequence[Any]) -> str | None:
        """Rows of one format can always be concatenated."""
        return None

    @classmethod
    def concat(cls: type[R], parts: Sequence[R]) -> R:
        """Row after row; the parts become views."""
        each = [one._of_rows() for one in parts]
        return replace(parts[0], **{name: concatenated([one[name] for one in each]) for name in each[0]})

    def at(self: R, rows: Any) -> R:
        """Some of the rows. rows: a slice, or int64 indices."""
        return replace(self, **{name: one[rows] for name, one in self._of_rows().items()})

    def _of_rows(self) -> dict[str, Tensor]:
        """The tensors with an entry a row."""
        return {name: one for name, one in self._fields() if isinstance(one, Tensor) and name not in self.shared}

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Rows can be split anywhere."""
        return why_not_split(self, rows)

    def split(self: R, rows: Sequence[int]) -> list[R]:
        """Parts of so many rows each; views. Raises KernelError where they do not make up the weight."""
        if reason := self.why_not_split(rows):
            raise KernelError(reason)
        stops = list(itertools.accumulate(rows))
        return [self.at(slice(stop - count, stop)) for stop, count in zip(stops, rows, strict=True)]


@dataclass(frozen=True, eq=False)
class Plain(RowMajor):
    """w[N, K], float."""

    def arguments(self) -> tuple[Tensor]:
        return (self.w,)

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        fits = self.w.dtype == dtype and self.w.is_contiguous()
        return None if fits else f"a weight is {self.w.dtype}, or is not contiguous"

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv; a copy where the weight has gaps."""
        w = self.w.contiguous()
        return WeightArguments("gemv", self.n, self.k, w, prefetchable=w is self.w)


@dataclass(frozen=True, eq=False)
class Int8Rows(RowMajor):
    """w[N, K] int8, scale[N, G] float."""

    scale: Tensor

    def arguments(self) -> tuple[Tensor, Tensor]:
        return self.w, self.scale

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        fits = self.scale.shape[1] == 1 and self.scale.dtype == torch.float32
        return None if fits else "an int8 weight does not have one float32 scale per row"

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_int8, for one scale a row."""
        w, scale = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        return WeightArguments("gemv_int8", self.n, self.k, w, 0, scale, prefetchable=w is self.w, variant="rows")


@dataclass(frozen=True, eq=False)
class Fp8Rows(RowMajor):
    """w[N, K] float8_e4m3fn or float8_e4m3fnuz, scale[N, 1] float; or e4m3fn and scale[N, ceil(K / 128)], of blocks.

    rounds: whether its input is to be rounded to e4m3 in groups of 128 as well, which is the module's matter.
    """

    scale: Tensor
    rounds: bool = field(default=False, kw_only=True)

    @property
    def blocks(self) -> bool:
        """Whether a row has several scales."""
        return self.scale.shape[1] > 1

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        if self.rounds:
            return "its input is rounded in groups of 128, which no fused layer does"
        fits = self.scale.dtype == torch.float32 and self.w.is_contiguous() and self.scale.is_contiguous()
        return None if fits else "a weight of 8-bit floats has scales that are not float32, or gaps"

    def arguments(self) -> tuple[Tensor, Tensor]:
        return self.w, self.scale

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_fp8."""
        w, scale = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        form, variant = (2, FP8_BLOCKS) if self.blocks else (FP8.index(w.dtype), fp8_name(w.dtype))
        prefetchable = w is self.w and scale is self.scale
        return WeightArguments("gemv_fp8", self.n, self.k, w, form, scale, prefetchable=prefetchable, variant=variant)


@dataclass(frozen=True, eq=False)
class Int4Rows(RowMajor):
    """w[N, K / 2] int8 of two codes a byte, the even k in the low nibble; scale[N, G].

    offset[N, G]: None, a float minimum or an integer zero point. codes: the name of a table of codebooks.py that the
    codes stand for, and then no offset, but of nvfp4 the factors[N, 1] of rows, float64; or "". input_scale[1]: what
    a checkpoint in nvfp4 says of its input, which is kept and not applied.
    """

    bits: ClassVar[int] = 4
    shared: ClassVar[tuple[str, ...]] = ("order", "input_scale")
    scale: Tensor
    offset: Tensor | None = None
    codes: str = ""
    input_scale: Tensor | None = field(default=None, kw_only=True)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, str]:
        return self.w, self.scale, self.offset, self.codes

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Int4Rows:
        """As of all rows. Raises KernelError for scales of another dtype than a codebook's."""
        made = super().with_tensors(tensors)
        if self.codes and made.scale.dtype != self.scale.dtype:
            raise KernelError(f"scale is {made.scale.dtype}, and {self.scale.dtype} belongs to codes of {self.codes}")
        return made

    @property
    def kind(self) -> str:
        """ "none", "minimum" or "zero_point"; or the table's name."""
        return self.codes or kind_of(self.offset)


@dataclass(frozen=True, eq=False)
class Int3Rows(RowMajor):
    """w[N, 3 K / 8] int8 of eight codes in three bytes: code k of a row begins at its bit 3 k, low bits first; scale[N,
    G] and offset[N, G] as of Int4Rows."""

    bits: ClassVar[int] = 3
    scale: Tensor
    offset: Tensor | None = None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.w, self.scale, self.offset

    @property
    def kind(self) -> str:
        """ "none", "minimum" or "zero_point"."""
        return kind_of(self.offset)


def kind_of(offset: Tensor | None) -> str:
    """The kind of a canonical offset, by its dtype: "none", "minimum" or "zero_point"."""
    return "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"
