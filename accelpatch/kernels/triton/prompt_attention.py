"""Rotary embedding of a prompt's q and k, and writing k and v into the cache; see ../ops/prompt_attention.py.

One program handles one token, HEADS heads at a time. A thread holds both halves of what it rotates, so that q can be
updated in place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.ops.attention_shape import AttentionShape
from accelpatch.kernels.triton.launch import cdiv, on

HEADS = 8
WARPS = 4


@triton.jit
def _normed(low, high, weight, columns, inside, half, eps, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of a row divided by its root mean square, times weight; rounded where transformers rounds."""
    if NORM:
        kind: tl.constexpr = low.dtype
        first, second = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        low = ((first * factor).to(kind).to(tl.float32) * scales).to(kind)
        scales = tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        high = ((second * factor).to(kind).to(tl.float32) * scales).to(kind)
    return low, high


@triton.jit(do_not_specialize=["length"])
def _rotate(  # type: ignore[no-untyped-def]
    qkv, positions, inv_freq, q_norm, k_norm, keys, values, length, capacity, heads, kv_heads, rope_scaling, eps,
    NORM: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, slot = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns, half = tl.arange(0, WIDE), SIZE // 2
    inside, every = columns < half, heads + 2 * kv_heads
    both = (head < every)[:, None] & inside[None, :]
    given = qkv + (token * every + head)[:, None] * SIZE + columns[None, :]
    kind: tl.constexpr = qkv.dtype.element_ty
    low, high = tl.load(given, mask=both, other=0.0), tl.load(given + half, mask=both, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    cos = (tl.cos(angle) * rope_scaling).to(kind).to(tl.float32)[None, :]
    sin = (tl.sin(angle) * rope_scaling).to(kind).to(tl.float32)[None, :]
    is_q, is_v = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    if NORM:
        q_low, q_high = _normed(low, high, q_norm, columns, inside, half, eps, NORM)
        k_low, k_high = _normed(low, high, k_norm, columns, inside, half, eps, NORM)
        rotated_low, rotated_high = tl.where(is_q, q_low, k_low), tl.where(is_q, q_high, k_high)
    else:
        rotated_low, rotated_high = low, high
    first, second = rotated_low.to(tl.float32), rotated_high.to(tl.float32)
    rotated_low = ((first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)).to(kind)
    rotated_high = ((second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)).to(kind)
    tl.store(given, rotated_low, mask=both & is_q)
    tl.store(given + half, rotated_high, mask=both & is_q)
    kv = tl.where(head >= heads + kv_heads, head - heads - kv_heads, head - heads)
    place = (((row * kv_heads + kv) * capacity + slot) * SIZE)[:, None] + columns[None, :]
    of_k = both & (head >= heads)[:, None] & (head < heads + kv_heads)[:, None]
    tl.store(keys + place, rotated_low, mask=of_k)
    tl.store(keys + place + half, rotated_high, mask=of_k)
    tl.store(values + place, low, mask=both & is_v)
    tl.store(values + place + half, high, mask=both & is_v)


def rotate_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """As the operation; all tensors must be contiguous."""
    every = shape.heads + 2 * shape.kv_heads
    norms = (qkv if shape.q_norm is None else shape.q_norm, qkv if shape.k_norm is None else shape.k_norm)
    if qkv.shape[0]:
        with on(qkv):
            _rotate[(qkv.shape[0], cdiv(every, HEADS))](
                qkv, positions, shape.inv_freq, *norms, keys, values, positions.shape[1], keys.shape[2],
                shape.heads, shape.kv_heads, shape.rope_scaling, shape.eps,
                shape.q_norm is not None, shape.size, triton.next_power_of_2(shape.size // 2), HEADS, num_warps=WARPS,
            )  # fmt: skip
