"""A 4-bit weight in the tiles that the HIP kernels read (hip/layout.py), made of the canonical tensors and undone.

Groups of 32, 64, or 128 times a power of two along K, or whole rows; scales and offsets of 16 bits. Both ways exact.

The rows of a gate and of its `up` can lie `paired`: 8 of each in a tile, as the kernels' gate wants them. Two weights
then hold the same tensors, each a part of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accelpatch.kernels import linear
from accelpatch.kernels.dispatch import require
from accelpatch.kernels.hip import layout
from accelpatch.kernels.hip.layout import TILE_ROWS, TILE_VALUES

ONE_GROUP = 1 << 20  # the C interface's word for one group a row
NO_SHIFT_LEFT = 30  # all steps share one set of scales


class Tiles(NamedTuple):
    """w[tiles, steps, 1024], scale and offset[tiles, sets, 8, groups, 2] of a weight[n, k], group along K.

    kind: "none", "minimum" or "zero_point", whose offsets are integers lying in scale's dtype. part: "all", the tiles
    hold the rows in their order; "both", they hold the first and the second half of the rows paired; "gate" or "up",
    this weight is the first or the second half of paired tiles that hold 2 n rows.
    """

    w: Tensor
    scale: Tensor
    offset: Tensor | None
    n: int
    k: int
    group: int
    kind: str
    part: str = "all"

    @property
    def rows(self) -> int:
        """Rows that the tiles hold."""
        return self.n if self.part in ("all", "both") else 2 * self.n


def places(k: int, group: int) -> dict[str, int]:
    """How layout.tile_scales lays out a table: steps of K, groups a step, log2 of the steps that share a set."""
    steps, whole = -(-k // TILE_VALUES), group == k
    shift = NO_SHIFT_LEFT if whole else max(group // TILE_VALUES, 1).bit_length() - 1
    return {"steps": steps, "groups": 1 if whole else max(TILE_VALUES // group, 1), "group_shift": shift}


def tile(q: Tensor, scale: Tensor, offset: Tensor | None) -> Tiles:
    """The tiles of canonical tensors. Raises KernelError for groups, scales or offsets that they cannot hold."""
    n, k = q.shape[0], 2 * q.shape[1]
    group = linear.check_scale("tiles", n, k, scale, offset)
    reason = unfit(k, group, scale.dtype)
    require(reason is None, "tiles", str(reason))
    require(exact(offset, scale.dtype), "tiles", f"an offset is no number of {scale.dtype}")
    beside = None if offset is None else offset.to(scale.dtype)
    scales, offsets = _table(scale, k, group), None if beside is None else _table(beside, k, group)
    return Tiles(layout.tile_int4(q), scales, offsets, n, k, group, kind_of(offset))


def exact(offset: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether offsets are numbers of `dtype`; looked at only where they are of another one."""
    return offset is None or offset.dtype == dtype or torch.equal(offset.to(dtype).to(offset.dtype), offset)


def _table(table: Tensor, k: int, group: int) -> Tensor:
    steps, groups, shift = places(k, group).values()
    return layout.tile_scales(table, steps=steps, groups=groups, group_shift=shift)


def kind_of(offset: Tensor | None) -> str:
    """What a canonical offset means, by its dtype."""
    return "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"


def untile(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, scale and offset as they were (zero points as int32): the inverse of `tile`."""
    w, scale, offset, n, k, group, kind, _ = alone(tiles)
    scales = layout.untile_scales(scale, n, k // group)
    beside = None if offset is None else layout.untile_scales(offset, n, k // group)
    if beside is not None and kind == "zero_point":
        beside = beside.to(torch.int32)
    return layout.untile_int4(w, n, k), scales, beside


def pair(gate: Tiles, up: Tiles | None = None) -> Tiles:
    """The "both" of a gate and its up, of 16 N rows each; without `up`, of one weight of 32 N rows that holds both."""
    parts = [alone(one) for one in (gate, up) if one is not None]
    w, scale = _interleaved([one.w for one in parts]), _interleaved([one.scale for one in parts])
    offsets = [one.offset for one in parts if one.offset is not None]
    offset = _interleaved(offsets) if offsets else None
    return parts[0]._replace(w=w, scale=scale, offset=offset, n=sum(one.n for one in parts), part="both")


def _interleaved(parts: list[Tensor]) -> Tensor:
    held = [_eights(one).flatten(0, 1) for one in parts]
    gate, up = held if len(held) == 2 else held[0].chunk(2)
    return _of_eights(torch.stack([gate, up], 1))


def alone(tiles: Tiles) -> Tiles:
    """The same rows in tiles of their own: a copy where they lie paired."""

    def own(table: Tensor) -> Tensor:
        gate, up = _eights(table).unbind(1)
        rows = {"gate": gate, "up": up}.get(tiles.part)
        return _of_eights((torch.cat([gate, up]) if rows is None else rows).unflatten(0, (-1, 2)))

    if tiles.part == "all":
        return tiles
    offset = None if tiles.offset is None else own(tiles.offset)
    return tiles._replace(w=own(tiles.w), scale=own(tiles.scale), offset=offset, part="all")


def _eights(table: Tensor) -> Tensor:
    """[tiles, 2, ...]: what belongs to 8 rows each, of weights or of scales."""
    return table.unflatten(2, (2, -1)).movedim(2, 1) if table.dim() == 3 else table.movedim(4, 1)


def _of_eights(table: Tensor) -> Tensor:
    return (table.movedim(1, 2).flatten(2) if table.dim() == 4 else table.movedim(1, 4)).contiguous()


def in_order(y: Tensor, part: str) -> Tensor:
    """A product's columns in the order of the tiles' rows -> those of the weight that is this `part` of them."""
    if part == "all":
        return y
    gate, up = y.unflatten(-1, (-1, 2, TILE_ROWS // 2)).unbind(-2)
    rows = {"gate": gate, "up": up}.get(part)
    return (torch.cat([gate, up], -2) if rows is None else rows).flatten(-2)


def in_tiles(bias: Tensor | None, part: str) -> Tensor | None:
    """A bias in the order of the tiles' rows, of which its weight is this `part`; zero where another weight's are."""
    if bias is None or part == "all":
        return bias
    eights = bias.view(-1, TILE_ROWS // 2)
    nothing = torch.zeros_like(eights)
    both = {"both": eights.chunk(2), "gate": (eights, nothing), "up": (nothing, eights)}[part]
    return torch.stack(both, 1).flatten()


def unfit(k: int, group: int, scale_dtype: torch.dtype | None) -> str | None:
    """Why a weight has no tiles; None where it has."""
    runs = group in (32, 64) or (group % TILE_VALUES == 0 and (group & (group - 1)) == 0)
    if not runs and group != k:
        return f"its groups are 32, 64, 128 times a power of two, or whole rows, not {group}"
    if scale_dtype not in (torch.float16, torch.bfloat16):
        return f"its scales are float16 or bfloat16, not {scale_dtype}"
    return None
