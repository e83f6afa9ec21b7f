"""GEMMs of some rows of x with int8, e4m3 and int4 weights on Hopper's matrix unit; see int8_linear.py, fp8_linear.py
and tiled_int4_linear.py in ../ops/linear/, and hopper_gemm_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelpatch.kernels.layouts.int4_tiles import NO_SHIFT_LEFT, Tiles, places
from accelpatch.kernels.layouts.tiling import TILE_VALUES
from accelpatch.kernels.triton import hopper_gemm_kernels as kernels
from accelpatch.kernels.triton.gemm import _add_up, flat_rows
from accelpatch.kernels.triton.launch import cdiv, dependent, on, processors

KINDS = {"none": 0, "zero_point": 1, "minimum": 2, "e4m3": 3}
SUMMED = ("zero_point", "minimum")  # what they add to each weight multiplies the sum of a group's x
PARTS = ("all", "both", "gate", "up")
DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None  # since Triton 3.4
STEPS = 8  # of x that a program of `spread` orders


@dataclass(frozen=True)
class Tile:
    """What a program takes: `tokens` rows of x and `rows` of the weight. programs: on an SM, where K can be split.
    pair: steps of K between two barriers, 1 or 2. tma: whether x comes by TMA."""

    tokens: int
    rows: int
    warps: int
    stages: int
    programs: int = 1
    pair: int = 1
    tma: bool = True

    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


LEAST_STEPS = 4  # of a split of K
#: bits of a code -> tiles, of which the first that has a call's rows is taken, else the last; measured on an H200
TILES = {
    4: (Tile(16, 64, 4, 6, 3, tma=False), Tile(32, 64, 4, 5, 3), Tile(64, 64, 4, 4, 2), Tile(128, 64, 4, 3, 2)),
    8: (Tile(16, 64, 4, 6, 3, tma=False), Tile(32, 64, 4, 4, 3), Tile(64, 64, 4, 4, 2), Tile(128, 64, 4, 3, 2)),
}


class Codes(NamedTuple):
    """A weight[n, k] as int16, `bits` a code, and its tables. kind: of KINDS. sets: of scales, one for each
    128 << shift values of K; scales: whether a row has several."""

    w: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    kind: str
    n: int
    k: int
    sets: int
    shift: int
    scales: bool


def int8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As int8_linear, for K a multiple of 128 and one scale a row or for each 128 of a power of two values of K."""
    return _bytes(x, q, scale, bias, "none")


def e4m3(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As fp8_linear, for K a multiple of 128 and weights of e4m3fn."""
    return _bytes(x, q, scale.to(torch.float32), bias, "e4m3")


def _bytes(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    q, scale = _aligned(q), scale.contiguous()
    (n, k), groups = q.shape, scale.shape[1]
    shift = (k // groups // TILE_VALUES).bit_length() - 1 if groups > 1 else NO_SHIFT_LEFT
    weight = Codes(q.view(torch.int16), scale, None, 8, kind, n, k, groups, shift, groups > 1)
    return _linear(x, weight, bias, n, "all")


def int4(x: Tensor, tiles: Tiles, bias: Tensor | None) -> Tensor:
    """As tiled_int4_linear, for groups of 128 and more. Of one half of interleaved tiles it computes the other too."""
    w, scale = _aligned(tiles.w).view(torch.int16), _aligned(tiles.scale)
    offset = None if tiles.offset is None else tiles.offset.contiguous()
    shift = places(tiles.k, tiles.group)["group_shift"]
    weight = Codes(w, scale, offset, 4, tiles.kind, tiles.rows, tiles.k, scale.shape[1], shift, True)
    return _linear(x, weight, bias, tiles.n, tiles.part)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on; copied only where needed."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _linear(x: Tensor, weight: Codes, bias: Tensor | None, columns: int, part: str) -> Tensor:
    flat, bias = flat_rows(x), None if bias is None else bias.contiguous()
    w, scale, offset, bits, kind, n, k, sets, shift, scales = weight
    m, steps = flat.shape[0], cdiv(k, TILE_VALUES)
    y, (overlapped, options) = x.new_empty((m, columns)), dependent(x)
    tile = next(one for one in TILES[bits] if one.tokens >= min(m, TILES[bits][-1].tokens))
    with on(x):
        ordered, sums = _ordered(flat, bits, kind in SUMMED, overlapped, options)
        x_tiled, tma = _x_argument(ordered, tile)
        programs = cdiv(m, tile.tokens) * cdiv(n, tile.rows)
        run = cdiv(steps, max(1, min(tile.programs * processors(x.device) // programs, steps // LEAST_STEPS, 8)))
        run = cdiv(run, tile.pair) * tile.pair
        splits = cdiv(steps, run)
        parts = y if splits == 1 else y.new_empty((splits, m, columns), dtype=torch.float32)
        bias_or_y = y if bias is None else bias
        kernels.product[(programs, splits)](
            x_tiled, ordered, sums, w, scale, scale if offset is None else offset, bias_or_y, y, parts, m, n, columns,
            k // 2, run, steps, sets, shift, bits, KINDS[kind], PARTS.index(part), scales, bias is not None, splits > 1,
            tma, x.is_cuda, overlapped, tile.tokens, tile.rows, tile.pair, **tile.options(), **options,
        )  # fmt: skip
        if splits > 1:
            _add_up[(cdiv(m * columns, 1024),)](
                parts, bias_or_y, y, m * columns, columns, splits, bias is not None, overlapped, 1024, **options
            )
    return y.view(*x.shape[:-1], columns)


def _ordered(flat: Tensor, bits: int, summed: bool, overlapped: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x in the order of the weights' bits, [M, 128 * steps], and the sums of each 128 of a row, [steps, M]."""
    (m, k), steps = flat.shape, cdiv(flat.shape[1], TILE_VALUES)
    out = flat.new_empty((m, steps * TILE_VALUES))
    sums = flat.new_empty((steps, m), dtype=torch.float32) if summed else out
    kernels.spread[(m, cdiv(steps, STEPS))](
        flat, out, sums, k, flat.stride(0), steps, bits, summed, overlapped, STEPS, **options
    )
    return out, sums


def _x_argument(ordered: Tensor, tile: Tile) -> tuple[Any, bool]:
    """x as the kernel takes it, and whether that is a descriptor of tiles, for Hopper's TMA."""
    if not (tile.tma and DESCRIPTORS and ordered.is_cuda):
        return ordered, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(ordered, [tile.tokens, TILE_VALUES]), True
