"""Experts for few tokens, two launches; see ../ops/experts/experts.py.

One program has one chosen expert of one token and a block of rows: gate, up and the activation; then rows of down,
added up over the token's experts in their order. The ids are read on the device. Nothing that a token gets depends on
the tokens beside it. Many tokens, and weights in tiles: grouped_experts.py.

4-bit codes: the bits of a code, in their place in the word, are or-ed into those of the float 2^23, from which 2^23 is
then subtracted: the code times a power of two, by which x is divided beforehand, exactly. Those of e2m1 are read as
float16, and their scales' bits are the exponents of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.expert_stack import BLOCK, Stack
from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.dequantize import _of_e2m1
from accelpatch.kernels.triton.gated_activation import CODES, _activated
from accelpatch.kernels.triton.launch import cdiv, dependent, on

CLAMPED = 7  # beside the codes of gated_activation
FLOAT, INT8, INT4 = 0, 1, 2
#: what the kernels call OFFSET: the codes less 8, a minimum, or the codes of e2m1
NONE, MINIMUM, E2M1 = 0, 1, 2
#: the bits of 2^23; handed in, since with two constants the mask and the or would be two instructions
POWER = 0x4B000000


@dataclass(frozen=True)
class Rows:
    """Tile of a program: `rows` of a matrix, and most `warps`, of 256 columns each (4 bits: of 8 blocks of 128)."""

    rows: int
    warps: int


#: kind of weight -> tiles of gate and up (so many rows of each), and of down
GATE_UP = {FLOAT: Rows(4, 4), INT8: Rows(4, 4), INT4: Rows(4, 4)}
OF_E2M1 = Rows(2, 4)  # of gate and up: with more rows registers spill
DOWN = {FLOAT: Rows(8, 4), INT8: Rows(8, 4), INT4: Rows(4, 4)}


@triton.jit
def _scaled_codes(words, x, power, NIBBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in a nibble of each word times x, float32."""
    PLACE: tl.constexpr = NIBBLE if NIBBLE < 5 else NIBBLE - 3  # a float's fraction has room for five
    held = words if NIBBLE < 5 else words >> 12
    bits = (held & (15 << (4 * PLACE))) | power
    return (bits.to(tl.float32, bitcast=True) - 8388608.0) * (x * (1.0 / (1 << (4 * PLACE))))


@triton.jit
def _factor(scale, valid, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales at these addresses, float32; of e2m1 from exponents, or in tiles from the bits of bfloat16."""
    if OFFSET != 2:
        return tl.load(scale, mask=valid, other=0.0).to(tl.float32)
    bits = tl.load(scale, mask=valid, other=0).to(tl.int32)
    bits = tl.where(bits == 0, 1 << 22, bits << 23) if scale.dtype.element_ty == tl.uint8 else bits << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    w, scale, offset, x, rows, block, valid, k, groups, power,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Blocks of rows of 4-bit codes times x: float32 [ROWS, BLOCKS].

    x: pointer to the row of x, or [BLOCKS]. rows[ROWS, BLOCKS] int64: numbers of rows in the whole stack. block[BLOCKS]
    of those rows. A warp has 8 blocks of all rows, so that a thread's words and its values of x go together.
    """
    word = tl.arange(0, 16)[None, None, :]
    first = (rows * tl.cdiv(k, 128) + block[None, :]) * 16
    words = tl.load(w + first[:, :, None] + word, mask=valid[:, :, None], other=0)
    total = tl.zeros([ROWS, BLOCKS], tl.float32)
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    for part in tl.static_range(PARTS):
        group = tl.minimum(block * PARTS + part if GROUP < 128 else block * 128 // GROUP, groups - 1)
        at = rows * groups + group[None, :]
        factor = _factor(scale + at, valid, OFFSET)
        sums = tl.zeros([ROWS, BLOCKS, 16], tl.float32)
        given = tl.zeros([1, BLOCKS, 16], tl.float32)
        for one in tl.static_range(8 // PARTS):
            column = block[None, :, None] * 128 + 16 * (part * (8 // PARTS) + one) + word
            value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
            if OFFSET == 2:
                sums += _of_e2m1(words >> (4 * (part * (8 // PARTS) + one))) * value
            else:
                given += value
                sums += _scaled_codes(words, value, power, part * (8 // PARTS) + one)
        if OFFSET == 2:
            total += tl.sum(sums, axis=2) * 16384.0 * factor
        elif OFFSET == 1:
            beside = tl.load(offset + at, mask=valid, other=0.0).to(tl.float32)
            total += tl.sum(sums, axis=2) * factor + tl.sum(given, axis=2) * beside
        else:
            total += (tl.sum(sums, axis=2) - 8.0 * tl.sum(given, axis=2)) * factor
    return total


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    w, scale, x, rows, inside, k, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """w[rows] . x of floats or int8, float32 [ROWS]. rows: int64 numbers of rows in the whole stack."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, COLUMNS):
        # runs of 8 values, of x and of weights alike: a thread then has both in the same places
        column = tl.max_contiguous(start + tl.arange(0, COLUMNS), 8)[None, :]
        given = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
        there = inside[:, None] & (column < k)
        values = tl.load(w + rows[:, None] * k + column, mask=there, other=0)
        sums += values.to(tl.float32) * given
    made = tl.sum(sums, axis=1)
    if KIND == 1:
        made *= tl.load(scale + rows, mask=inside, other=0.0).to(tl.float32)
    return made


@triton.jit
def _gate(gate, up, alpha, limit, KIND: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) * up in float32; what torch rounds between, to the dtype KIND's pointer has, is rounded here."""
    if CODE == 7:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    return _activated(gate, CODE).to(KIND).to(tl.float32) * up


@triton.jit(do_not_specialize=["chosen", "power"])
def _gate_up(  # type: ignore[no-untyped-def]
    x, ids, w, scale, offset, bias, h, k, inner, experts, chosen, groups, x_stride, power, alpha, limit,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert >= 0) & (expert < experts):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        first = expert * (2 * inner) + row
        own = x + pair // chosen * x_stride
        both = tl.arange(0, 2 * ROWS)  # rows of gate, and those of up
        held = tl.program_id(0) * ROWS + both % ROWS
        rows = expert * (2 * inner) + held + both // ROWS * inner
        inside = held < inner
        if KIND == 2:
            total = tl.zeros([2 * ROWS, COLUMNS], tl.float32)
            blocks = tl.cdiv(k, 128)
            for start in range(0, blocks, COLUMNS):
                block = start + tl.arange(0, COLUMNS)
                valid = inside[:, None] & (block < blocks)[None, :]
                at = rows[:, None] + tl.zeros([1, COLUMNS], tl.int64)
                total += _codes(
                    w, scale, offset, own, at, block, valid, k, groups, power, OFFSET, GROUP, 2 * ROWS, COLUMNS
                )
            made = tl.sum(total, axis=1)
        else:
            made = _row_sums(w, scale, own, rows, inside, k, KIND, 2 * ROWS, COLUMNS)
        gate, up = tl.split(tl.trans(tl.reshape(made, [2, ROWS])))
        if BIAS:
            gate += tl.load(bias + first, mask=row < inner, other=0.0).to(tl.float32)
            up += tl.load(bias + first + inner, mask=row < inner, other=0.0).to(tl.float32)
        dtype = h.dtype.element_ty
        made = _gate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), alpha, limit, dtype, CODE)
        tl.store(h + pair * inner + row, made.to(dtype), mask=row < inner)


@triton.jit
def _down_codes(  # type: ignore[no-untyped-def]
    h, ids, weights, w, scale, offset, token, row, k, width, experts, chosen, groups, power,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The weighted sum of rows over a token's experts: their blocks one after the other, as one long row."""
    blocks, total = tl.cdiv(k, 128), tl.zeros([ROWS, BLOCKS], tl.float32)
    for start in range(0, blocks * chosen, BLOCKS):
        number = start + tl.arange(0, BLOCKS)
        pair = token * chosen + number // blocks
        there = number < blocks * chosen
        expert = tl.load(ids + pair, mask=there, other=-1).to(tl.int64)
        known = (expert >= 0) & (expert < experts)
        factor = tl.load(weights + pair, mask=known, other=0.0).to(tl.float32)
        own = h + tl.where(known, pair, token * chosen) * k
        rows = tl.where(known, expert, 0)[None, :] * width + row[:, None]
        valid = (row < width)[:, None] & known[None, :]
        made = _codes(w, scale, offset, own[None, :, None], rows, number % blocks, valid, k, groups, power, OFFSET,
                      GROUP, ROWS, BLOCKS)  # fmt: skip
        total += tl.where(known[None, :], made, 0.0) * factor[None, :]
    return tl.sum(total, axis=1)


@triton.jit(do_not_specialize=["chosen", "power"])
def _down(  # type: ignore[no-untyped-def]
    h, ids, weights, w, scale, offset, bias, residual, y, k, width, experts, chosen, groups, power,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < width
    if KIND == 2:
        total = _down_codes(h, ids, weights, w, scale, offset, token, row, k, width, experts, chosen, groups, power,
                            OFFSET, GROUP, ROWS, COLUMNS)  # fmt: skip
    else:
        total = tl.zeros([ROWS], tl.float32)
    if BIAS or KIND != 2:
        for place in range(chosen):
            pair = token * chosen + place
            expert = tl.load(ids + pair).to(tl.int64)
            if (expert >= 0) & (expert < experts):
                rows = expert * width + row
                made = tl.zeros([ROWS], tl.float32)
                if KIND != 2:
                    made = _row_sums(w, scale, h + pair * k, rows, inside, k, KIND, ROWS, COLUMNS)
                if BIAS:
                    made += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
                total += made * tl.load(weights + pair).to(tl.float32)
    out = y + token * width + row
    if RESIDUAL:
        total = total.to(y.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + token * width + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, total.to(y.dtype.element_ty), mask=inside)


def code_of(activation: str) -> int:
    """The kernels' number of an activation."""
    return CODES.get(activation, CLAMPED)


def weight_arguments(stack: Stack, k: int) -> tuple[tuple[Tensor, ...], int, dict[str, Any]]:
    """(tensors, groups of a row, compile-time values) of a stack for a launch; what is missing has a stand-in."""
    w, scale, offset, bias = (None if one is None else one.contiguous() for one in stack)
    assert w is not None
    groups = stack.groups
    if stack.tiled:
        w = w.view(torch.int32)
    elif stack.codes and scale is not None:
        scale = scale.view(torch.uint8)
    form = {
        "KIND": {4: INT4, 8: INT8}.get(stack.bits, FLOAT),
        "OFFSET": E2M1 if stack.codes else NONE if offset is None else MINIMUM,
        # whole rows are a multiple of a block that no row reaches
        "GROUP": k // groups if groups > 1 else cdiv(k, BLOCK) * BLOCK,
        "BIAS": bias is not None,
    }
    return tuple(w if one is None else one for one in (w, scale, offset, bias)), groups, form


def of_few(
    x: Tensor, ids: Tensor, weights: Tensor, up: Stack, down: Stack, gate: tuple[str, float, float],
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each chosen expert of each token for itself."""
    (tokens, width), chosen, (number, rows) = x.shape, ids.shape[1], up.w.shape[:2]
    inner, y = rows // 2, x.new_empty(x.shape)
    if not tokens:
        return y
    x, ids, weights = (one if one.is_contiguous() else one.contiguous() for one in (x, ids, weights))
    h = x.new_empty((ids.numel(), inner))
    overlapped, options = dependent(x)
    with on(x):
        tensors, groups, form = weight_arguments(up, width)
        tile = OF_E2M1 if form["OFFSET"] == E2M1 else GATE_UP[form["KIND"]]
        _gate_up[(cdiv(inner, tile.rows), ids.numel())](
            x, ids, *tensors, h, width, inner, number, chosen, groups, width, POWER, gate[1], gate[2], **form,
            CODE=code_of(gate[0]), DEPENDENT=overlapped, **shape(tile, form["KIND"], width), **options,
        )  # fmt: skip
        tensors, groups, form = weight_arguments(down, inner)
        tile = DOWN[form["KIND"]]
        beside = x if residual is None else residual.contiguous()
        _down[(cdiv(width, tile.rows), tokens)](
            h, ids, weights, *tensors, beside, y, inner, width, number, chosen, groups, POWER,
            **form, RESIDUAL=residual is not None, DEPENDENT=overlapped,
            **shape(tile, form["KIND"], inner * (chosen if form["KIND"] == INT4 else 1)), **options,
        )  # fmt: skip
    return y


def shape(tile: Rows, kind: int, k: int) -> dict[str, int]:
    """A tile's launch options: fewer warps, each with as many columns, where K has fewer."""
    warp = 8 if kind == INT4 else 256
    whole = cdiv(k, BLOCK) if kind == INT4 else k
    warps = min(tile.warps, 1 << (cdiv(whole, warp) - 1).bit_length())
    return {"ROWS": tile.rows, "COLUMNS": warp * warps, "num_warps": warps}
