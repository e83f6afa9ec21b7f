"""Experts for few tokens, two launches; see ../ops/experts/experts.py.

One program has one chosen expert of one token and a block of rows: gate, up and the activation; then rows of down,
added up over the token's experts in their order. The ids are read on the device. A token's result does not depend on
the other tokens of the call. The dot products with a token are in expert_rows.py; many tokens, and weights in tiles,
are in grouped_experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.codebooks import FP8_CODES, NVFP4
from accelpatch.kernels.layouts.expert_stack import BLOCK, Stack
from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.expert_rows import _codes, _row_sums
from accelpatch.kernels.triton.gated_activation import CODES, _activated
from accelpatch.kernels.triton.launch import cdiv, dependent, on

CLAMPED = 7  # an activation that gated_activation's CODES do not have
FLOAT, INT8, INT4, FP8 = 0, 1, 2, 3
#: what the kernels call OFFSET: the codes less 8, a minimum, the codes of e2m1, or those of NVFP4
NONE, MINIMUM, E2M1, NV = 0, 1, 2, 3
#: the bits of 2^23; an argument of the kernels, since with two constants the mask and the or were two instructions
POWER = 0x4B000000
OF_CODES = {"e2m1": E2M1, NVFP4: NV}


@dataclass(frozen=True)
class Rows:
    """Tile of a program: `rows` of a matrix, and most `warps`, of 256 columns each (4 bits: of 8 blocks of 128)."""

    rows: int
    warps: int


#: kind of weight -> tiles of gate and up (so many rows of each), and of down
GATE_UP = {FLOAT: Rows(4, 4), INT8: Rows(4, 4), INT4: Rows(4, 4), FP8: Rows(4, 4)}
OF_E2M1 = Rows(2, 4)  # of gate and up: with more rows registers spill
DOWN = {FLOAT: Rows(8, 4), INT8: Rows(8, 4), INT4: Rows(4, 4), FP8: Rows(8, 4)}


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
        inner_row = tl.program_id(0) * ROWS + both % ROWS
        rows = expert * (2 * inner) + inner_row + both // ROWS * inner
        inside = inner_row < inner
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
            made = _row_sums(w, scale, own, rows, inside, k, groups, KIND, 2 * ROWS, COLUMNS)
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
    """The weighted sum of rows over a token's experts, whose blocks are read one after the other as one long row."""
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
                    made = _row_sums(w, scale, h + pair * k, rows, inside, k, groups, KIND, ROWS, COLUMNS)
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
    elif stack.codes == FP8_CODES:
        w = w.view(torch.int8)
    elif stack.codes and scale is not None:
        scale = scale.view(torch.uint8)
    form = {
        "KIND": FP8 if stack.codes == FP8_CODES else {4: INT4, 8: INT8}.get(stack.bits, FLOAT),
        "OFFSET": OF_CODES.get(stack.codes, NONE if offset is None else MINIMUM),
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
        tile = OF_E2M1 if form["OFFSET"] >= E2M1 else GATE_UP[form["KIND"]]
        _gate_up[(cdiv(inner, tile.rows), ids.numel())](
            x, ids, *tensors, h, width, inner, number, chosen, groups, width, POWER, gate[1], gate[2], **form,
            CODE=code_of(gate[0]), DEPENDENT=overlapped, **shape(tile, form["KIND"], width), **options,
        )  # fmt: skip
        tensors, groups, form = weight_arguments(down, inner)
        tile = DOWN[form["KIND"]]
        residual_or_x = x if residual is None else residual.contiguous()
        _down[(cdiv(width, tile.rows), tokens)](
            h, ids, weights, *tensors, residual_or_x, y, inner, width, number, chosen, groups, POWER,
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
