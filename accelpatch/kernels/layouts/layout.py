"""The interface of weight layouts. A layout is one class in a file of this folder, and one row of
`ops.linear.by_layout.LINEARS`.

A quantised module has one layout and no other copy of its weight. A state dict has the `tensors()` of the canonical
form, a RowMajor, and `by_layout.laid_out` makes a device's layout. `arguments()` are what the layout's operation takes
between x and the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

L = TypeVar("L")


@dataclass(frozen=True)
class WeightArguments:
    """The launch arguments of a weight w[n, k], in the format of a function of the device library.

    function: one of compiling/gpu_libraries.py. form: its format argument, None where it takes none. scale, offset:
    float32 per row; or 16-bit tiles (tiling.py), one per 2 ** group_shift K steps; or scale and outliers of
    compact_tiles.py, 4 * group_shift outliers per row. prefetchable: False if the tensors are copies made for this
    launch. variant: of the function's libraries, the one for this format. offset of gemv_w8a8: the static scale of x,
    float32[1], or None where each row has its own.
    """

    function: str
    n: int
    k: int
    w: Tensor
    form: int | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    offset_kind: str = "none"
    group_shift: int = 0
    prefetchable: bool = True
    variant: str = ""


class Layout(Protocol):
    """A weight[n, k] in the layout that a kernel reads. w: its main tensor. part: "all"; or "both", "gate" or "up" of
    interleaved rows (see tiled.py). tiled: whether rows lie in tiles, where a gate needs them interleaved. order:
    int32[k], the input of each column (GPTQ's act-order), or None. orders: whether the operation applies it itself."""

    @property
    def w(self) -> Tensor: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def part(self) -> str: ...

    @property
    def order(self) -> Tensor | None: ...

    @property
    def orders(self) -> bool: ...

    @property
    def tiled(self) -> bool: ...

    @property
    def whole_rows(self) -> bool:
        """Whether a launch needs all of a row of x before it starts, as int8 activations do for their scale."""

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""

    def arguments(self) -> tuple[Any, ...]:
        """What the layout's operation takes between x and the bias."""

    def launch(self) -> WeightArguments:
        """The arguments of a launch of the device library."""

    def canonical(self) -> Any:
        """The canonical form, a RowMajor with the same numbers."""

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        """Why no fused layer of a GPU computes with it for x of `dtype`; None where one can."""

    @staticmethod
    def why_not_concat(parts: Sequence[Any]) -> str | None:
        """Why weights of one format cannot be concatenated; None where they can."""

    @classmethod
    def concat(cls: type[L], parts: Sequence[L]) -> L:
        """Weights of one format as one, row after row; the parts' tensors become views of it, but those of a Pack."""

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Why the weight cannot be split into parts of so many rows each; None where it can."""

    def split(self: L, rows: Sequence[int]) -> list[L]:
        """Weights of so many rows each, in order: the inverse of `concat`. Views where rows lie in their order.

        Raises KernelError where `why_not_split` has a reason.
        """


def nbytes_of(tensors: Sequence[Any]) -> int:
    """Bytes of the tensors among `tensors`."""
    return sum(one.nbytes for one in tensors if isinstance(one, Tensor))


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension; they become views of the result. Nothing is copied where they are
    contiguous already."""
    joined = in_one_run(parts)
    if joined is None:
        joined = torch.cat([part.detach() for part in parts])
        at = 0
        for part in parts:
            part.data = joined[at : at + part.shape[0]]
            at += part.shape[0]
    return joined


def why_not_split(weight: Any, rows: Sequence[int], step: int = 1) -> str | None:
    """Why a weight cannot be split into parts of so many rows each, multiples of `step`; None where it can."""
    if weight.part != "all":
        return "its rows are interleaved with others: `alone()` gives them tiles of their own"
    if sum(rows) != weight.n or min(rows, default=0) < 1:
        return f"parts of {list(rows)} rows do not make up {weight.n}"
    whole = all(count % step == 0 for count in rows)
    return None if whole else f"parts of {list(rows)} rows are not multiples of {step}"


def in_one_run(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over `parts` where they are contiguous with each other in memory; else None."""
    first = parts[0].detach()
    at = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != at or not part.is_contiguous():
            return None
        at += part.numel() * part.element_size()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())
