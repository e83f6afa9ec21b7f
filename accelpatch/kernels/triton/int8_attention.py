"""Attention in int8 with static scales; see ../ops/attention/int8_attention.py.

One program has BLOCK_M queries of a head and goes over the keys twice: first for each query's largest score and the sum
of its exponentials, then for its rounded probabilities and their products with the values. Those are taken in float16,
which holds whole numbers up to 2,048 exactly and is added up in float32, since matrix units want int8 values
transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.flash_tiles import Tile
from accelpatch.kernels.triton.launch import cdiv, on
from accelpatch.kernels.triton.quantize_rows import nearest

_LOG2_E = tl.constexpr(1.4426950408889634)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: an integer below 2^22 added to its bits is added to its value
_MAGIC = tl.constexpr(0x4B400000)  # its bits
_MAGIC_HALF = tl.constexpr(0x6480)  # those of 1,152 in float16, for int8 values


# of prompts and of steps, measured on Hopper; heads above 128 would not fit its shared memory so
BLOCKS = Tile(128, 128, 8, 3), Tile(16, 256, 8, 2)
LARGE_HEADS = Tile(128, 64, 8, 3), Tile(16, 128, 4, 3)
AMD = Tile(128, 32, 8, 2), Tile(16, 32, 4, 2)  # with more keys registers spill


@triton.jit
def _floats(sums, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 sums as float32. Below 2^22 by an addition of integers, which takes a fourth of a conversion's time."""
    if SIZE > 128:
        return sums.to(tl.float32)
    return (sums + _MAGIC).to(tl.float32, bitcast=True) - _ROUND


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    queries, k_tile, seen, scale, rows, keys, m, n, first, columns, mask_m, mask_n,
    SIZE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2, minus infinity for keys that are not seen. EDGE: of a tile that has such keys."""
    if EDGE or columns.shape[0] > SIZE:
        key_tile = tl.load(k_tile, mask=(keys < n)[None, :] & (columns < SIZE)[:, None], other=0)
    else:
        key_tile = tl.load(k_tile)
    s = _floats(tl.dot(queries, key_tile, out_dtype=tl.int32), SIZE) * scale
    if EDGE:
        there = (keys < n)[None, :]
        if CAUSAL:
            there = there & (keys[None, :] <= first + rows[:, None])
        if MASKED:
            at = seen + rows[:, None] * mask_m + keys[None, :] * mask_n
            there = there & (tl.load(at, mask=(rows < m)[:, None] & (keys < n)[None, :], other=0) != 0)
        s = tl.where(there, s, float("-inf"))
    return s


@triton.jit
def _softmax(  # type: ignore[no-untyped-def]
    most, total, start, stop, queries, keys_of, seen, scale, rows, ahead, m, n, first, columns, k_n, mask_m, mask_n,
    SIZE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each query's largest score and its sum of exponentials, with those of the keys from start to stop."""
    for at in tl.range(start, stop, BLOCK_N):
        keys = at + ahead
        s = _scores(queries, keys_of + keys.to(tl.int64)[None, :] * k_n, seen, scale, rows, keys, m, n, first, columns,
                    mask_m, mask_n, SIZE, MASKED, CAUSAL, EDGE)  # fmt: skip
        larger = tl.maximum(most, tl.max(s, axis=1))
        known = tl.where(larger == float("-inf"), 0.0, larger) if EDGE else larger
        total = total * tl.exp2(most - known) + tl.sum(tl.exp2(s - known[:, None]), axis=1)
        most = larger
    return most, total


@triton.jit
def _weighted(  # type: ignore[no-untyped-def]
    sums, start, stop, most, times, queries, keys_of, values_of, seen, scale, rows, ahead, m, n, first, columns,
    k_n, v_n, mask_m, mask_n,
    SIZE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of rounded probabilities times values, with those of the keys from start to stop."""
    for at in tl.range(start, stop, BLOCK_N):
        keys = at + ahead
        s = _scores(queries, keys_of + keys.to(tl.int64)[None, :] * k_n, seen, scale, rows, keys, m, n, first, columns,
                    mask_m, mask_n, SIZE, MASKED, CAUSAL, EDGE)  # fmt: skip
        p = (tl.fma(tl.exp2(s - most[:, None]), times[:, None] + tl.zeros_like(s), _ROUND) - _ROUND).to(tl.float16)
        v_tile = values_of + keys.to(tl.int64)[:, None] * v_n
        if EDGE or columns.shape[0] > SIZE:
            values = tl.load(v_tile, mask=(keys < n)[:, None] & (columns < SIZE)[None, :], other=0)
        else:
            values = tl.load(v_tile)
        values = (values.to(tl.int16) + _MAGIC_HALF).to(tl.float16, bitcast=True) - 1152.0
        sums = tl.dot(p, values, sums)
    return sums


@triton.jit(do_not_specialize=["m", "n"])
def attend(  # type: ignore[no-untyped-def]
    q, k, v, scales, mask, y, heads, m, n,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, mask_b, mask_h, mask_m, mask_n,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK_M
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows, columns, ahead = start + tl.arange(0, BLOCK_M), tl.arange(0, WIDE), tl.arange(0, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < SIZE)[None, :]
    at = batch * q_b + head * q_h + rows.to(tl.int64)[:, None] * q_m + columns[None, :]
    queries = tl.load(q + at, mask=inside, other=0)
    keys_of = k + batch * k_b + head * k_h + columns[:, None]
    values_of = v + batch * v_b + head * v_h + columns[None, :]
    seen = mask + batch * mask_b + head * mask_h
    scale, back, first = tl.load(scales) * _LOG2_E, tl.load(scales + 1), n - m
    last = tl.minimum(n, first + start + BLOCK_M) if CAUSAL else n
    whole = (first + start + 1 if CAUSAL else n) // BLOCK_N * BLOCK_N  # keys that every query sees
    whole = 0 if MASKED else whole
    most, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for edge in tl.static_range(2):
        most, total = _softmax(most, total, whole if edge else 0, last if edge else whole, queries, keys_of, seen,
                               scale, rows, ahead, m, n, first, columns, k_n, mask_m, mask_n,
                               SIZE, MASKED, CAUSAL, edge == 1, BLOCK_N)  # fmt: skip
    most = tl.where(most == float("-inf"), 0.0, most)
    times = tl.where(total > 0, 127.0 / tl.where(total > 0, total, 1.0), 0.0)
    sums = tl.zeros([BLOCK_M, WIDE], tl.float32)
    for edge in tl.static_range(2):
        sums = _weighted(sums, whole if edge else 0, last if edge else whole, most, times, queries, keys_of, values_of,
                         seen, scale, rows, ahead, m, n, first, columns, k_n, v_n, mask_m, mask_n,
                         SIZE, MASKED, CAUSAL, edge == 1, BLOCK_N)  # fmt: skip
    out = y + ((batch * m + rows)[:, None] * heads + head) * SIZE + columns[None, :]
    tl.store(out, nearest(sums * back).to(tl.int8), mask=inside)


def int8_attention(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """As the operation."""
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    (b, h, m, d), n = q.shape, k.shape[2]
    y = q.new_empty((b, m, h * d))
    if not y.numel():
        return y
    many, few = AMD if torch.version.hip else LARGE_HEADS if d > 128 else BLOCKS
    block = few if m <= few.m else many
    seen = q if mask is None else mask.expand(b, h, m, n).view(torch.uint8)
    strides = (0,) * 4 if mask is None else seen.stride()
    with on(q):
        attend[(cdiv(m, block.m), b * h)](
            q, k, v, scales.to(torch.float32).contiguous(), seen, y, h, m, n,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides,
            mask is not None, causal and m > 1, d, max(32, triton.next_power_of_2(d)), block.m, block.n,
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
    return y
