"""Base of weights in tiles of 16 rows: interleaving of gate and up, concatenation and splitting by whole tiles.

The rows of gate and up can be interleaved: 8 of each in a tile, as the kernels' gate epilogue needs them. The two
weights then share the same tensors. part: "all": the rows in their order. "both": the first and second half of the rows
interleaved. "gate" or "up": this weight is the first or second half of interleaved tiles of 2 n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.layout import concatenated, nbytes_of, why_not_split
from accelpatch.kernels.layouts.tiling import TILE_ROWS

T = TypeVar("T", bound="Tiled")


class Tiled:
    """Base of both kinds of tiles, which are frozen dataclasses; it iterates over `arguments()`."""

    tiled: ClassVar[bool] = True
    orders: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    w: Tensor
    n: int
    k: int
    part: str
    order: Tensor | None

    @staticmethod
    def eights(table: Tensor) -> Tensor:
        """A table split into groups of 8 rows: [tiles, 2, ...]."""
        raise NotImplementedError

    @staticmethod
    def of_eights(table: Tensor) -> Tensor:
        """The inverse of `eights`, contiguous."""
        raise NotImplementedError

    def arguments(self) -> tuple[Any, ...]:
        """What the layout's operation takes between x and the bias."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arguments())

    def replace(self: T, **changes: Any) -> T:
        """A copy with other values of some fields."""
        return replace(self, **changes)  # type: ignore[type-var]

    @property
    def rows(self) -> int:
        """Rows in the tiles."""
        return self.n if self.part in ("all", "both") else 2 * self.n

    @property
    def tables(self) -> dict[str, Tensor]:
        """The tensors with an entry a tile, by name."""
        found = {name: value for name, value in vars(self).items() if name != "order"}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return nbytes_of((*self.tables.values(), self.order))

    def alone(self: T) -> T:
        """The same rows in tiles of their own; a copy where they were interleaved with others."""
        if self.part == "all":
            return self

        def own(table: Tensor) -> Tensor:
            gate, up = self.eights(table).unbind(1)
            rows = {"gate": gate, "up": up}.get(self.part)
            return self.of_eights((torch.cat([gate, up]) if rows is None else rows).unflatten(0, (-1, 2)))

        return self.replace(part="all", **{name: own(table) for name, table in self.tables.items()})

    def pair(self: T, up: T | None = None) -> T:
        """Interleave this gate and `up`, of 16 N rows each, to "both". Without `up` this has the 32 N rows of both."""
        parts = self.alike([one.alone() for one in (self, up) if one is not None])

        def interleaved(tables: list[Tensor]) -> Tensor:
            halves = [self.eights(one).flatten(0, 1) for one in tables]
            gate, up = halves if len(halves) == 2 else halves[0].chunk(2)
            return self.of_eights(torch.stack([gate, up], 1))

        tables: dict[str, Any] = {name: interleaved([one.tables[name] for one in parts]) for name in parts[0].tables}
        return parts[0].replace(n=sum(one.n for one in parts), part="both", **tables)

    @staticmethod
    def alike(parts: list[T]) -> list[T]:
        """The same tiles, with tensors that can be concatenated."""
        return parts

    @staticmethod
    def why_not_concat(parts: Sequence[Any]) -> str | None:
        """Why tiles cannot be concatenated: not all of them are full. None where they can."""
        full = all(one.n % TILE_ROWS == 0 for one in parts)
        return None if full else f"the number of rows in tiles is not a multiple of {TILE_ROWS}"

    @classmethod
    def concat(cls: type[T], parts: Sequence[T]) -> T:
        """Row after row; the parts, `alike`, of 16 N rows each and in tiles of their own, become views."""
        names = parts[0].tables
        joined: dict[str, Any] = {name: concatenated([one.tables[name] for one in parts]) for name in names}
        return parts[0].replace(n=sum(one.n for one in parts), **joined)

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Parts are whole tiles."""
        return why_not_split(self, rows, TILE_ROWS)

    def split(self: T, rows: Sequence[int]) -> list[T]:
        """Parts of so many rows each; views. Raises KernelError where tiles would be cut or are interleaved."""
        if reason := self.why_not_split(rows):
            raise KernelError(reason)
        sizes = [count // TILE_ROWS for count in rows]
        tensors = {name: value.split(sizes) for name, value in self.tables.items()}
        parts = zip(*tensors.values(), strict=True)
        return [
            self.replace(n=count, **dict(zip(tensors, part, strict=True)))
            for count, part in zip(rows, parts, strict=True)
        ]


def in_order(y: Tensor, part: str) -> Tensor:
    """Reorder output columns from the order of rows in the tiles to that of the weight, which is this `part`."""
    if part == "all":
        return y
    gate, up = y.unflatten(-1, (-1, 2, TILE_ROWS // 2)).unbind(-2)
    rows = {"gate": gate, "up": up}.get(part)
    return (torch.cat([gate, up], -2) if rows is None else rows).flatten(-2)


def in_tiles(bias: Tensor | None, part: str) -> Tensor | None:
    """A bias in the order of rows in the tiles; zero for rows of the other weight."""
    if bias is None or part == "all":
        return bias
    eights = bias.view(-1, TILE_ROWS // 2)
    nothing = torch.zeros_like(eights)
    both = {"both": eights.chunk(2), "gate": (eights, nothing), "up": (nothing, eights)}[part]
    return torch.stack(both, 1).flatten()
