"""3-bit weights in tiles as floats, for torch's GEMM; the bits of a tile: `Int3` in ../hip/gemv/formats.h."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.int3_tiles import Int3Tiles
from accelpatch.kernels.layouts.int4_tiles import places
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.triton.dequantize import Floats, by_slices
from accelpatch.kernels.triton.launch import cdiv, on

ROWS = 32
KINDS = {"none": 0, "zero_point": 1, "minimum": 2}


@triton.jit(do_not_specialize=["steps", "sets", "shift"])
def _int3_weight_rows(  # type: ignore[no-untyped-def]
    tiles, scale, offset, out, n, k, steps, sets, shift,
    KIND: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    rows, step = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = tl.arange(0, 128)
    clamped = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
    # Which of the eight operands has the value of a column, in which byte, and in which word its upper bits lie.
    e = column % 4 * 2 + column // 4 % 2
    operand, byte = column // 32 * 2 + e // 4, e % 4
    split = operand >= 6
    word = tl.where(split, operand - 6, operand // 2)
    place = (clamped % 8 * 4)[:, None] + (column // 8 % 4)[None, :]
    tile, upper = tiles + ((clamped // 16 * steps + step) * 768)[:, None], (clamped % 16 // 8)[:, None]
    third = tile + 512 + place * 8 + upper * 4 + byte[None, :]
    own = tl.where((word == 2)[None, :], third, tile + place * 16 + upper * 8 + (word * 4 + byte)[None, :])
    bits = tl.load(own).to(tl.int32)
    top = tl.load(third, mask=split[None, :] & (rows < n)[:, None], other=0).to(tl.int32)
    shifted = (bits >> tl.where(operand % 2 == 0, 5, 2)[None, :]) & 7
    joined = (bits & 3) | (((top >> (operand - 6 + tl.where(split, 0, 6))[None, :]) & 1) << 2)
    code = (tl.where(split[None, :], joined, shifted) ^ 4).to(tl.float32)
    at = ((clamped // 16 * sets + (step >> shift)) * 8 + clamped % 8)[:, None] * (2 * GROUPS) + upper
    at = at + (column // (128 // GROUPS) * 2)[None, :]
    scales = tl.load(scale + at).to(tl.float32)
    if KIND == 0:
        value = (code - 4.0) * scales
    elif KIND == 1:
        value = (code - tl.load(offset + at).to(tl.float32)) * scales
    else:
        value = code * scales + tl.load(offset + at).to(tl.float32)
    columns = step * 128 + column
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    if INTERLEAVED:  # the first 8 rows of a tile are of the first half (gate), the last 8 of the second (up)
        rows = rows // 16 * 8 + rows % 8 + rows % 16 // 8 * (n // 2)
    tl.store(out + rows[:, None] * k + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


def int3_floats(tiles: Int3Tiles) -> Floats:
    """A function (start, stop, out) that writes those rows of the weight to out[stop - start, K]; start must be a
    multiple of 16. Of interleaved rows, those of the first half are written first."""
    w, scale = tiles.w.contiguous().view(torch.uint8), tiles.scale.contiguous()
    offset = scale if tiles.offset is None else tiles.offset.contiguous()
    steps, groups, shift = places(tiles.k, tiles.group).values()

    def floats(start: int, stop: int, out: Tensor) -> None:
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        tables = (w[first:last], scale[first:last], offset[first:last])
        _int3_weight_rows[(cdiv(stop - start, ROWS), steps)](
            *tables, out, stop - start, tiles.k, steps, scale.shape[1], shift, KINDS[tiles.kind], groups, ROWS,
            tiles.part == "both",
        )  # fmt: skip

    return floats


def tiled_int3_linear(x: Tensor, tiles: Int3Tiles, bias: Tensor | None) -> Tensor:
    """As the operation, for tiles of rows in order or for "both" halves interleaved."""
    flat = x.reshape(-1, tiles.k)
    y = x.new_empty((flat.shape[0], tiles.n))
    if flat.shape[0]:
        with on(x):
            by_slices(flat, y, bias, int3_floats(tiles), tiles.part == "both")
    return y.view(*x.shape[:-1], tiles.n)
