"""What every weight layout offers: one class in a file of this folder, and one row of `ops.by_layout.LINEARS`.

`arguments()` are what the layout's operation takes between x and the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.tiling import TILE_ROWS

L = TypeVar("L")


@dataclass(frozen=True)
class WeightArguments:
    """What a launch says of a weight w[n, k] in the format of a function of the device library.

    function: one of build.gpu_libraries. form: its format argument, None where it takes none. scale, offset: float32
    per row; or 16-bit tiles (tiling.py), one per 2 ** group_shift K steps; or scale and outliers of compact_tiles.py,
    4 * group_shift outliers per row. prefetchable: False if the tensors are copies made for this launch. variant: of
    the function's libraries, the one for this format. offset of gemv_w8a8: the static scale of
    x, float32[1], or None where each row has its own.
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
    """A weight[n, k] as it lies in memory. w: its main tensor. part: "all"; or "both", "gate" or "up" of interleaved
    rows (see int4_tiles.py). tiled: whether rows lie in tiles, where a gate needs them interleaved."""

    @property
    def w(self) -> Tensor: ...

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def part(self) -> str: ...

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

    def unpack(self) -> Any:
        """What `pack` took."""

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
    """Concatenate tensors along the first dimension; they become views of the result. None is copied that lies so."""
    joined = in_one_run(parts)
    if joined is None:
        joined = torch.cat([part.detach() for part in parts])
        at = 0
        for part in parts:
            part.data = joined[at : at + part.shape[0]]
            at += part.shape[0]
    return joined


def why_not_concat_tiles(parts: Sequence[Any]) -> str | None:
    """Why tiles cannot be concatenated: not all of them are full. None where they can."""
    full = all(one.n % TILE_ROWS == 0 for one in parts)
    return None if full else f"the number of rows in tiles is not a multiple of {TILE_ROWS}"


def why_not_split(weight: Any, rows: Sequence[int], step: int = 1) -> str | None:
    """Why a weight cannot be split into parts of so many rows each, multiples of `step`; None where it can."""
    if weight.part != "all":
        return "its rows are interleaved with others: `alone()` gives them tiles of their own"
    if sum(rows) != weight.n or min(rows, default=0) < 1:
        return f"parts of {list(rows)} rows do not make up {weight.n}"
    whole = all(count % step == 0 for count in rows)
    return None if whole else f"parts of {list(rows)} rows are not multiples of {step}"


def split_tiles(weight: Any, rows: Sequence[int]) -> list[Any]:
    """Tiles split into parts of so many rows each; views. Raises KernelError where tiles would be cut."""
    if reason := weight.why_not_split(rows):
        raise KernelError(reason)
    sizes = [count // TILE_ROWS for count in rows]
    tensors = {name: value.split(sizes) for name, value in weight._asdict().items() if isinstance(value, Tensor)}
    each = [dict(zip(tensors, parts, strict=True)) for parts in zip(*tensors.values(), strict=True)]
    return [weight._replace(n=count, **parts) for count, parts in zip(rows, each, strict=True)]


def concatenated_tiles(parts: Sequence[Any]) -> dict[str, Any]:
    """The tensors of tiles, and n, for the rows of all parts, row after row."""
    names = [name for name, value in parts[0]._asdict().items() if isinstance(value, Tensor)]
    tensors = {name: concatenated([getattr(one, name) for one in parts]) for name in names}
    return {**tensors, "n": sum(one.n for one in parts)}


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
