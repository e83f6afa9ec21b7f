"""Experts for many tokens: tokens sorted by expert, then GEMM tiles of one expert each; see ops/experts/experts.py.

Nothing waits for the host: there are as many programs as the tokens could need, and a program finds its expert by the
number of tiles before it. Weights are dequantised in registers and rounded to x's dtype, as in the reference. Where
they lie in tiles of the HIP kernels, activations are reordered as the nibbles of a tile are: x before the launch, the
output of gate and up when it is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels.choice import few
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.layouts.expert_tiles import in_tile_order
from accelpatch.kernels.triton.dequantize import _of_e2m1, _of_e4m3
from accelpatch.kernels.triton.expert_rows import _factor
from accelpatch.kernels.triton.experts import _gate, code_of, of_few, weight_arguments
from accelpatch.kernels.triton.gemm import Block
from accelpatch.kernels.triton.launch import cdiv, on

# A program has `tokens` of one expert and `rows` of its matrix; of floats and int8 `columns` of K at a time.
#: the first whose tokens are as many as come to an expert on average, else the last; the largest not on AMD
TILES = (Block(16, 64, 64, 4, 4), Block(32, 64, 64, 4, 4), Block(64, 64, 64, 4, 3), Block(128, 128, 64, 8, 3))
AMD_TILES = TILES[:-1]
#: of codes in tiles the first whose tokens are twice as many, else the last: an expert with more reads its codes again
CODE_TILES = (Block(16, 64, 128, 4, 4), Block(64, 64, 128, 4, 3), Block(256, 128, 128, 8, 2))
LARGEST_SHARED = 144 << 10  # bytes of a block of the last of them
WIDE = Block(16, 32, 32, 4, 2)  # float32 takes twice the memory


@triton.jit
def _tile_of(ends, counts, tile, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first of its sorted pairs in tile number `tile`, the end of the expert's pairs).

    ends[E]: of each expert's pairs; counts: E.
    """
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < counts, other=0)
    before = tl.load(ends + number - 1, mask=(number > 0) & (number < counts), other=0)
    tiles = (end - before + TOKENS - 1) // TOKENS
    tiles = tl.where(number < counts, tiles, 0)
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= tile).to(tl.int32), 0)
    mine = number == expert
    start = tl.sum(tl.where(mine, before, 0), 0)
    first = tl.sum(tl.where(mine, through - tiles, 0), 0)
    return expert, start + (tile - first) * TOKENS, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _value(words, scales, minimum, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights in the lowest nibble of each word, float32."""
    if OFFSET >= 2:
        return _of_e2m1(words) * 16384.0 * scales
    code = ((words & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return code * scales + minimum if OFFSET == 1 else (code - 8.0) * scales


@triton.jit
def _two(words, FIRST: tl.constexpr, SECOND: tl.constexpr, scales, minimum, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights in two nibbles of each word, [..., 2]."""
    first = _value(words >> (4 * FIRST), scales, minimum, OFFSET)
    return tl.join(first, _value(words >> (4 * SECOND), scales, minimum, OFFSET))


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    w, scale, offset, x, row, inside, here, k, groups, total,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total`[rows, tokens] and the products of rows of 4-bit codes with tokens. x: pointers to the tokens' rows."""
    blocks = tl.cdiv(k, 128)
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    word = tl.arange(0, 16)
    for block in range(blocks):
        words = tl.load(w + row[:, None] * (blocks * 16) + block * 16 + word[None, :], mask=inside[:, None], other=0)
        for part in tl.static_range(PARTS):
            group = tl.minimum(block * PARTS + part if GROUP < 128 else block * 128 // GROUP, groups - 1)
            scales = _factor(scale + row * groups + group, inside, OFFSET)[:, None]
            if OFFSET == 3:
                scales = scales * tl.load(offset + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            minimum = scales
            if OFFSET == 1:
                minimum = tl.load(offset + row * groups + group, mask=inside, other=0.0).to(tl.float32)[:, None]
            for one in tl.static_range(8 // PARTS):
                column = block * 128 + 16 * (part * (8 // PARTS) + one) + word
                x_tile = tl.load(x[None, :] + column[:, None], mask=here[None, :] & (column < k)[:, None], other=0.0)
                value = _value(words >> (4 * (part * (8 // PARTS) + one)), scales, minimum, OFFSET).to(x_tile.dtype)
                total = tl.dot(value, x_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def _tile_codes(  # type: ignore[no-untyped-def]
    w, scale, offset, x, row, inside, here, k, groups, total,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As _codes, in tiles; row: of the tiles. Values of x lie in the order of a tile's nibbles.

    A word has values of one group; the 16 words of a row have 128 values, in PARTS groups.
    """
    blocks = tl.cdiv(k, 128)
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    word, column = tl.arange(0, 16), tl.arange(0, 128)
    tile, r = row // 16, row % 16
    part = word % 4 * PARTS // 4
    for block in range(blocks):
        first = (tile * blocks + block) * 256 + r * 16
        # Tiles store the top bit of each nibble inverted.
        words = tl.load(w + first[:, None] + word[None, :], mask=inside[:, None], other=0) ^ -2004318072
        at = (tile * (groups // PARTS) + (block if GROUP < 128 else block * 128 // GROUP)) * 8 + r % 8
        places = (at * (2 * PARTS) + r // 8)[:, None]
        if PARTS > 1:
            places = places + 2 * part[None, :]
        scales = _factor(scale + places, inside[:, None], OFFSET)
        minimum = scales
        if OFFSET == 1:
            minimum = tl.load(offset + places, mask=inside[:, None], other=0.0).to(tl.float32)
        x_tile = tl.load(x[None, :] + (block * 128 + column)[:, None], mask=here[None, :], other=0.0)
        even = tl.join(_two(words, 0, 4, scales, minimum, OFFSET), _two(words, 2, 6, scales, minimum, OFFSET))
        odd = tl.join(_two(words, 1, 5, scales, minimum, OFFSET), _two(words, 3, 7, scales, minimum, OFFSET))
        values = tl.join(even, odd).to(x_tile.dtype).reshape(row.shape[0], 128)
        total = tl.dot(values, x_tile, total, input_precision=PRECISION)
    return total


@triton.jit
def _tile_place(row):  # type: ignore[no-untyped-def]
    """Where value `row` of an activation lies in the order of a tile's nibbles."""
    inside = row % 128
    word, nibble = inside // 8 % 4 * 4 + inside // 32, inside % 2 * 4 + inside // 2 % 4
    return row - inside + word * 8 + nibble


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    w, scale, offset, x, row, inside, here, k, groups,
    KIND: tl.constexpr, TILED: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """w[row] . x of each token, float32 [ROWS, TOKENS]. row: int64 numbers of rows in the whole stack."""
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    if TILED:
        return _tile_codes(w, scale, offset, x, row, inside, here, k, groups, total, OFFSET, GROUP, PRECISION)
    if KIND == 2:
        return _codes(w, scale, offset, x, row, inside, here, k, groups, total, OFFSET, GROUP, PRECISION)
    for start in range(0, k, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x_tile = tl.load(x[None, :] + column[:, None], mask=here[None, :] & (column < k)[:, None], other=0.0)
        there = inside[:, None] & (column < k)[None, :]
        values = tl.load(w + row[:, None] * k + column[None, :], mask=there, other=0)
        if KIND == 3:  # COLUMNS divides the 128 values that share a scale
            scales = tl.load(scale + row * groups + start // 128, mask=inside, other=0.0)
            values = _of_e4m3(values.to(tl.int32)) * scales[:, None]
        total = tl.dot(values.to(x_tile.dtype), x_tile, total, input_precision=PRECISION)
    if KIND == 1:
        total *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["chosen", "tiles"])
def _gate_up(  # type: ignore[no-untyped-def]
    x, order, ends, w, scale, offset, bias, h, k, inner, experts, chosen, tiles, groups, alpha, limit,
    KIND: tl.constexpr, TILED: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    CODE: tl.constexpr, PRECISION: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, start, end = _tile_of(ends, experts, tl.program_id(0) % tiles, EXPERTS, TOKENS)
    if expert < experts:
        place = start + tl.arange(0, TOKENS)
        here = place < end
        token = tl.load(order + place, mask=here, other=0) // chosen
        # 8 rows of gate come before their 8 rows of up, in tiles and in the sums.
        local = tl.arange(0, ROWS)
        row, of_up = tl.program_id(0) // tiles * (ROWS // 2) + local // 16 * 8 + local % 8, local // 8 % 2
        inside = row < inner
        first = expert.to(tl.int64) * (2 * inner)
        place_of_bias = first + of_up * inner + row
        lies = first + row // 8 * 16 + row % 8 + 8 * of_up if TILED else place_of_bias
        made = _sums(w, scale, offset, x + token * k, lies, inside, here, k, groups, KIND, TILED, OFFSET, GROUP,
                     PRECISION, ROWS, TOKENS, COLUMNS)  # fmt: skip
        if BIAS:
            made += tl.load(bias + place_of_bias, mask=inside, other=0.0).to(tl.float32)[:, None]
        gate, up = made.reshape(ROWS // 16, 2, 8, TOKENS).permute(0, 2, 3, 1).split()
        gate, up = gate.reshape(ROWS // 2, TOKENS), up.reshape(ROWS // 2, TOKENS)
        row = tl.program_id(0) // tiles * (ROWS // 2) + tl.arange(0, ROWS // 2)
        inside = row < inner
        dtype = h.dtype.element_ty
        made = _gate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), alpha, limit, dtype, CODE)
        column = _tile_place(row) if TILED else row
        out = h + place.to(tl.int64)[None, :] * inner + column[:, None]
        tl.store(out, made.to(dtype), mask=inside[:, None] & here[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _down(  # type: ignore[no-untyped-def]
    h, order, ends, weights, w, scale, offset, bias, parts, k, width, experts, tiles, groups,
    KIND: tl.constexpr, TILED: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, start, end = _tile_of(ends, experts, tl.program_id(0) % tiles, EXPERTS, TOKENS)
    if expert < experts:
        place = start + tl.arange(0, TOKENS)
        here = place < end
        pair = tl.load(order + place, mask=here, other=0)
        row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
        inside = row < width
        first = expert.to(tl.int64) * width + row
        own = h + place.to(tl.int64) * k
        made = _sums(w, scale, offset, own, first, inside, here, k, groups, KIND, TILED, OFFSET, GROUP, PRECISION,
                     ROWS, TOKENS, COLUMNS)  # fmt: skip
        if BIAS:
            made += tl.load(bias + first, mask=inside, other=0.0).to(tl.float32)[:, None]
        made *= tl.load(weights + pair, mask=here, other=0.0).to(tl.float32)[None, :]
        out = parts + pair[None, :] * width + row[:, None]
        tl.store(out, made.to(parts.dtype.element_ty), mask=inside[:, None] & here[None, :])


def tiles_of(device: Device, tiled: bool) -> tuple[Block, ...]:
    """The tiles to choose from, the smallest first. tiled: codes in tiles."""
    if device.vendor == "amd":
        return AMD_TILES
    if not tiled:
        return TILES
    return CODE_TILES if device.facts is None or device.facts.block_shared >= LARGEST_SHARED else CODE_TILES[:-1]


def sorted_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(pairs by their experts int64[T k], the end of each expert's int32[E]); ids out of range come last."""
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    sorted_ids, order = torch.sort(flat, stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=sorted_ids.dtype)
    return order, torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)


def grouped(
    x: Tensor, ids: Tensor, weights: Tensor, up: Stack, down: Stack, activation: str, alpha: float, limit: float
) -> Tensor:
    """The operation by tiles of tokens of one expert."""
    (tokens, width), chosen, number, pairs = x.shape, ids.shape[1], len(up.w), ids.numel()
    if not pairs:
        return x.new_zeros(x.shape)
    inner, weights = up.n // 2, weights.contiguous()
    x = in_tile_order(x) if up.tiled else x.contiguous()
    order, ends = sorted_pairs(ids, number)
    wide = x.dtype == torch.float32
    tile_sizes = tiles_of(probe(x.device), up.tiled)
    least = pairs * (2 if up.tiled else 1)
    tile = WIDE if wide else next((one for one in tile_sizes if one.tokens * number >= least), tile_sizes[-1])
    tiles = min(pairs, cdiv(pairs, tile.tokens) + number)
    h, parts = x.new_empty((pairs, inner)), x.new_zeros((pairs, width))
    shared: dict[str, Any] = {
        "PRECISION": "ieee", "EXPERTS": max(2, 1 << (number - 1).bit_length()), "ROWS": tile.rows,
        "TOKENS": tile.tokens, "COLUMNS": tile.columns, "TILED": up.tiled,
    }  # fmt: skip
    with on(x):
        tensors, groups, form = weight_arguments(up, width)
        _gate_up[(tiles * cdiv(2 * inner, tile.rows),)](
            x, order, ends, *tensors, h, width, inner, number, chosen, tiles, groups, alpha, limit, **form,
            CODE=code_of(activation), **shared, **tile.options(),
        )  # fmt: skip
        tensors, groups, form = weight_arguments(down, inner)
        _down[(tiles * cdiv(width, tile.rows),)](
            h, order, ends, weights, *tensors, parts, inner, width, number, tiles, groups, **form, **shared,
            **tile.options(),
        )  # fmt: skip
    return parts.view(tokens, chosen, width).sum(dim=1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """As the operation: few tokens one by one, many grouped by expert."""
    up, down, gate, residual = Stack(*given[:4]), Stack(*given[4:8]), given[8:11], given[11]
    if up.tiled or not few(ids.numel(), len(up.w)):
        y = grouped(x, ids, weights, up, down, *gate)
        return y if residual is None else y.add_(residual)
    return of_few(x, ids, weights, up, down, gate, residual)
