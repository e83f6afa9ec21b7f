"""One program per row, and per q or k; a thread holds pairs of neighbouring columns; ops/attention/query_key.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.query_key_form import QueryKey
from accelpatch.kernels.triton import launch

WARPS = 4


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    qkv, positions, q_norm, k_norm, inv_freq, columns, heads, kv_heads, eps, rope_scaling,
    NORM: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, is_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(is_k, kv_heads, heads) * SIZE
    even = 2 * tl.arange(0, BLOCK)
    inside = even < width
    place = qkv + row * columns + tl.where(is_k, heads * SIZE, 0) + even
    kind: tl.constexpr = qkv.dtype.element_ty
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + 1, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first) + tl.sum(second * second)
        factor = tl.rsqrt(squares / width + eps)
        weight = tl.where(is_k, k_norm, q_norm)
        low = tl.load(weight + even, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(weight + even + 1, mask=inside, other=0.0).to(tl.float32)
        first = ((first * factor).to(kind).to(tl.float32) * low).to(kind).to(tl.float32)
        second = ((second * factor).to(kind).to(tl.float32) * high).to(kind).to(tl.float32)
    if PAIRS > 0:
        pair = (even % SIZE) // 2
        rotating = inside & (pair < PAIRS)
        angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + pair, mask=rotating, other=0.0).to(
            tl.float32
        )
        cos = (tl.cos(angle) * rope_scaling).to(kind).to(tl.float32)
        sin = (tl.sin(angle) * rope_scaling).to(kind).to(tl.float32)
        left = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
        right = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
        first, second = tl.where(rotating, left, first), tl.where(rotating, right, second)
    tl.store(place, first.to(kind), mask=inside)
    tl.store(place + 1, second.to(kind), mask=inside)


def prepare_query_key_(qkv: Tensor, positions: Tensor, form: QueryKey) -> None:
    """As the operation."""
    if not qkv.shape[0]:
        return
    norms = [qkv if weight is None else weight for weight in (form.q_norm, form.k_norm)]
    pairs = 0 if form.inv_freq is None else form.inv_freq.shape[0]
    with launch.on(qkv):
        _prepare[(qkv.shape[0], 2)](
            qkv, positions, *norms, qkv if form.inv_freq is None else form.inv_freq, qkv.shape[1], form.heads,
            form.kv_heads, form.eps, form.rope_scaling, form.q_norm is not None, pairs, form.size,
            triton.next_power_of_2(form.heads * form.size // 2), num_warps=WARPS,
        )  # fmt: skip
