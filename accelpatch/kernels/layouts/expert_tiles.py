"""4-bit matrices of a layer's experts in tiles of the HIP kernels (tiling.py), w[E, tiles, steps, 1024], and back.

Rows of gate and up are interleaved: a tile has 8 gates and then their 8 ups. N is a multiple of 16 and K of 128, so
that nothing is padded, tables[E, tiles, sets, 8, groups, 2] say how many groups a row has, and the experts follow each
other: a kernel finds its own by its number. The scales of e2m1 lie there as the bits of bfloat16, in int16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels.codebooks import E8M0
from accelpatch.kernels.layouts import int4_tiles, tiling
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES

TILE_BYTES = TILE_ROWS * TILE_VALUES // 2


def unfit(n: int, k: int, group: int, scale_dtype: torch.dtype | None, codes: str = "") -> str | None:
    """Why matrices [n, k] have no tiles; None where they have. codes: as of int4_tiles.unfit."""
    if n % TILE_ROWS or k % TILE_VALUES:
        return f"tiles hold multiples of {TILE_ROWS} rows by {TILE_VALUES} columns, not {n} x {k}"
    return int4_tiles.unfit(k, group, scale_dtype, codes)


def shapes(experts: int, n: int, k: int, groups: int) -> tuple[list[int], list[int]]:
    """The shapes of the tiles, and of the tables of scales and offsets, of matrices with so many groups a row."""
    steps, of_step, shift = int4_tiles.places(k, k // groups).values()
    sets = ((steps - 1) >> shift) + 1
    return [experts, n // TILE_ROWS, steps, TILE_BYTES], [experts, n // TILE_ROWS, sets, TILE_ROWS // 2, of_step, 2]


def tiled(
    q: Tensor, scale: Tensor, offset: Tensor | None, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tiles and both tables, in scale's dtype, from canonical q[E, N, K / 2], scale and offset[E, N, G]."""
    experts, n, half = q.shape
    if scale.dtype == E8M0:
        scale = scale.to(torch.bfloat16).view(torch.int16)
    w = q.new_empty(shapes(experts, n, 2 * half, scale.shape[2])[0])
    for into, one in zip(w, q, strict=True):  # one by one: some of the steps take several times its memory
        into.copy_(tiling.tile_int4(_interleaved(one) if interleaved else one))
    offset_table = None if offset is None else _table(offset.to(scale.dtype), 2 * half, interleaved)
    return w, _table(scale, 2 * half, interleaved), offset_table


def untiled(
    w: Tensor, scale: Tensor, offset: Tensor | None, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, scale and offset; the inverse of `tiled`."""
    experts, tiles, steps, _ = w.shape
    n, k = tiles * TILE_ROWS, steps * TILE_VALUES
    q = w.new_empty((experts, n, k // 2))
    for into, one in zip(q, w, strict=True):
        rows = tiling.untile_int4(one, n, k)
        into.copy_(_in_order(rows) if interleaved else rows)
    offsets, scales = None if offset is None else _untable(offset, n, interleaved), _untable(scale, n, interleaved)
    return q, scales.view(torch.bfloat16).float().to(E8M0) if scales.dtype == torch.int16 else scales, offsets


def in_tile_order(x: Tensor) -> Tensor:
    """x[T, K] with the values of each 128 in the order of a tile's nibbles: the 8 of each of a row's 16 words."""
    places = x.reshape(
        len(x), x.shape[1] // TILE_VALUES, 4, 4, 4, 2
    )  # of word 4 t + p: p, t, i, and e = 2 i + the last, in nibble i + 4 * last
    return places.permute(0, 1, 3, 2, 5, 4).reshape(x.shape)


def _interleaved(rows: Tensor) -> Tensor:
    """[N, ...]: 8 of the first half, and the 8 of the second that go with them."""
    return rows.view(2, -1, TILE_ROWS // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _in_order(rows: Tensor) -> Tensor:
    return rows.view(-1, 2, TILE_ROWS // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _table(table: Tensor, k: int, interleaved: bool) -> Tensor:
    steps, of_step, shift = int4_tiles.places(k, k // table.shape[2]).values()
    each = [
        tiling.tile_scales(_interleaved(one) if interleaved else one, steps=steps, groups=of_step, group_shift=shift)
        for one in table
    ]
    return torch.stack(each)


def _untable(table: Tensor, n: int, interleaved: bool) -> Tensor:
    each = [tiling.untile_scales(one, n, one.shape[1] * one.shape[3]) for one in table]
    return torch.stack([_in_order(one) if interleaved else one for one in each])
