"""Attention in int8 with static scales; see ../ops/int8_attention.py.

One program has BLOCK_M queries of a head and goes over the keys twice: first for each query's largest score and the sum
of its exponentials, then for its rounded probabilities and their products with the values. Those are taken in float16,
which holds whole numbers up to 2,048 exactly and is added up in float32, since matrix units want int8 values
transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.launch import cdiv, on
from accelpatch.kernels.triton.quantize_rows import nearest

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Block:
    """Queries and keys of a program's tiles; its warps and stages."""

    m: int
    n: int
    warps: int
    stages: int


PROMPT = Block(128, 64, 8, 3)
STEP = Block(16, 128, 4, 3)
AMD_STEP = Block(16, 64, 4, 2)  # with more keys scalar registers spill


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    queries, k_tile, seen, scale, rows, keys, n, first, columns, size,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, mask_m, mask_n, m,
):  # fmt: skip
    """Scores in units of log2, minus infinity for keys that are not seen."""
    held = tl.load(k_tile, mask=(keys < n)[None, :] & (columns < size)[:, None], other=0)
    s = tl.dot(queries, held, out_dtype=tl.int32).to(tl.float32) * scale
    there = (keys < n)[None, :]
    if CAUSAL:
        there = there & (keys[None, :] <= first + rows[:, None])
    if MASKED:
        at = seen + rows[:, None] * mask_m + keys[None, :] * mask_n
        there = there & (tl.load(at, mask=(rows < m)[:, None] & (keys < n)[None, :], other=0) != 0)
    return tl.where(there, s, float("-inf"))


@triton.jit
def _softmax(  # type: ignore[no-untyped-def]
    queries, keys_of, seen, scale, rows, ahead, n, first, last, columns, k_n, mask_m, mask_n, m,
    SIZE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of each query its largest score, 0 where it sees no key, and 127 over the sum of the exponentials, or 0."""
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in tl.range(0, last, BLOCK_N):
        keys = at + ahead
        s = _scores(queries, keys_of + keys.to(tl.int64)[None, :] * k_n, seen, scale, rows, keys, n, first, columns,
                    SIZE, MASKED, CAUSAL, mask_m, mask_n, m)  # fmt: skip
        larger = tl.maximum(most, tl.max(s, axis=1))
        known = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(most - known) + tl.sum(tl.exp2(s - known[:, None]), axis=1)
        most = larger
    times = tl.where(total > 0, 127.0 / tl.where(total > 0, total, 1.0), 0.0)
    return tl.where(most == float("-inf"), 0.0, most), times


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
    most, times = _softmax(queries, keys_of, seen, scale, rows, ahead, n, first, last, columns, k_n, mask_m, mask_n, m,
                           SIZE, MASKED, CAUSAL, BLOCK_M, BLOCK_N)  # fmt: skip
    sums = tl.zeros([BLOCK_M, WIDE], tl.float32)
    for at in tl.range(0, last, BLOCK_N):
        keys = at + ahead
        s = _scores(queries, keys_of + keys.to(tl.int64)[None, :] * k_n, seen, scale, rows, keys, n, first, columns,
                    SIZE, MASKED, CAUSAL, mask_m, mask_n, m)  # fmt: skip
        p = nearest(tl.exp2(s - most[:, None]) * times[:, None]).to(tl.float16)
        there = (keys < n)[:, None] & (columns < SIZE)[None, :]
        values = tl.load(values_of + keys.to(tl.int64)[:, None] * v_n, mask=there, other=0)
        sums = tl.dot(p, values.to(tl.float16), sums)
    out = y + ((batch * m + rows)[:, None] * heads + head) * SIZE + columns[None, :]
    tl.store(out, nearest(sums * back).to(tl.int8), mask=inside)


def int8_attention(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """As the operation."""
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    (b, h, m, d), n = q.shape, k.shape[2]
    y = q.new_empty((b, m, h * d))
    if not y.numel():
        return y
    few = AMD_STEP if torch.version.hip else STEP
    block = few if m <= few.m else PROMPT
    seen = q if mask is None else mask.expand(b, h, m, n).view(torch.uint8)
    strides = (0,) * 4 if mask is None else seen.stride()
    with on(q):
        attend[(cdiv(m, block.m), b * h)](
            q, k, v, scales.to(torch.float32).contiguous(), seen, y, h, m, n,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides,
            mask is not None, causal and m > 1, d, max(32, triton.next_power_of_2(d)), block.m, block.n,
            num_warps=block.warps, num_stages=2 if torch.version.hip else block.stages,
        )  # fmt: skip
    return y
