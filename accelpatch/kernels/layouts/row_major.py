"""Weights in the order of their rows: floats as they are, and 8-bit values with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.layout import WeightArguments, concatenated, nbytes_of, why_not_split

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
    """w[N, K]; what the layouts of this file share. They pack nothing: their tensors are the canonical ones."""

    part: ClassVar[str] = "all"
    tiled: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    w: Tensor

    @classmethod
    def pack(cls: type[R], *tensors: Tensor) -> R:
        """From the canonical tensors, in the order of the fields."""
        return cls(*tensors)

    def arguments(self) -> tuple[Tensor, ...]:
        """The tensors, as the layout's operation takes them between x and the bias."""
        return tuple(getattr(self, field.name) for field in fields(self))

    unpack = arguments

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return int(self.w.shape[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return int(self.w.shape[1])

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return type(self), *((one.dtype, one.shape[1]) for one in self.arguments())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return nbytes_of(self.arguments())

    @staticmethod
    def why_not_concat(parts: Sequence[RowMajor]) -> str | None:
        """Rows of one format can always be concatenated."""
        return None

    @classmethod
    def concat(cls: type[R], parts: Sequence[R]) -> R:
        """Row after row; the parts become views."""
        return cls(*map(concatenated, zip(*(one.arguments() for one in parts), strict=True)))

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Rows can be split anywhere."""
        return why_not_split(self, rows)

    def split(self: R, rows: Sequence[int]) -> list[R]:
        """Parts of so many rows each; views. Raises KernelError where they do not make up the weight."""
        if reason := self.why_not_split(rows):
            raise KernelError(reason)
        return [type(self)(*parts) for parts in zip(*(one.split(list(rows)) for one in self.arguments()), strict=True)]


@dataclass(frozen=True, eq=False)
class Plain(RowMajor):
    """w[N, K], float."""

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv; a copy where the weight has gaps."""
        w = self.w.contiguous()
        return WeightArguments("gemv", self.n, self.k, w, prefetchable=w is self.w)


@dataclass(frozen=True, eq=False)
class Int8Rows(RowMajor):
    """w[N, K] int8, scale[N, G] float."""

    scale: Tensor

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_int8, for one scale a row."""
        w, scale = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        return WeightArguments("gemv_int8", self.n, self.k, w, 0, scale, prefetchable=w is self.w, variant="rows")


@dataclass(frozen=True, eq=False)
class Fp8Rows(RowMajor):
    """w[N, K] float8_e4m3fn or float8_e4m3fnuz, scale[N, 1] float."""

    scale: Tensor

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_fp8."""
        w, scale = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        form, prefetchable = FP8.index(w.dtype), w is self.w
        return WeightArguments(
            "gemv_fp8", self.n, self.k, w, form, scale, prefetchable=prefetchable, variant=fp8_name(w.dtype)
        )
