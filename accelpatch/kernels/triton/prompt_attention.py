"""Rotary embedding of a prompt's q and k, and writing k and v into the cache; see ../ops/attention/prompt_attention.py.

One program handles one token, HEADS heads at a time. A thread holds both halves of what it rotates, so that q can be
updated in place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.triton.launch import cdiv, on
from accelpatch.kernels.triton.rotation import normed

HEADS = 8
WARPS = 4


@triton.jit
def _squares(part):  # type: ignore[no-untyped-def]
    """The sum of the squares of each row."""
    return tl.sum(part.to(tl.float32) * part.to(tl.float32), axis=1)


@triton.jit
def _normed(part, factor, is_q, q_norm, k_norm, columns, inside, PLUS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of rows of q and k after their norms."""
    of_q = normed(part, factor, tl.load(q_norm + columns, mask=inside, other=0.0), PLUS_ONE)
    return tl.where(is_q, of_q, normed(part, factor, tl.load(k_norm + columns, mask=inside, other=0.0), PLUS_ONE))


@triton.jit
def _rotated(first, second, angle, rope_scaling):  # type: ignore[no-untyped-def]
    """Both halves of the rotated columns, rounded as transformers rounds."""
    kind: tl.constexpr = first.dtype
    cos = (tl.cos(angle) * rope_scaling).to(kind).to(tl.float32)[None, :]
    sin = (tl.sin(angle) * rope_scaling).to(kind).to(tl.float32)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = ((a * cos).to(kind).to(tl.float32) - (b * sin).to(kind).to(tl.float32)).to(kind)
    second = ((b * cos).to(kind).to(tl.float32) + (a * sin).to(kind).to(tl.float32)).to(kind)
    return first, second


@triton.jit(do_not_specialize=["length"])
def _rotate(  # type: ignore[no-untyped-def]
    qkv, positions, inv_freq, q_norm, k_norm, keys, values, length, capacity, heads, kv_heads, rope_scaling, eps,
    NORM: tl.constexpr, PLUS_ONE: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr, WIDE: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, slot = token // length, token % length
    head, half = tl.program_id(1) * HEADS + tl.arange(0, HEADS), ROTARY // 2
    columns, further = tl.arange(0, WIDE), ROTARY + tl.arange(0, REST)  # those of a partial embedding stay
    inside, beyond, every = columns < half, further < SIZE, heads + 2 * kv_heads
    both, rest = (head < every)[:, None] & inside[None, :], (head < every)[:, None] & beyond[None, :]
    start = qkv + (token * every + head)[:, None] * SIZE
    low = tl.load(start + columns[None, :], mask=both, other=0.0)
    high = tl.load(start + half + columns[None, :], mask=both, other=0.0)
    last = tl.load(start + further[None, :], mask=rest, other=0.0)
    is_q, is_v = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    first, second, third = low, high, last
    if NORM:
        factor = tl.rsqrt((_squares(low) + _squares(high) + _squares(last)) / SIZE + eps)
        first = _normed(low, factor, is_q, q_norm, k_norm, columns, inside, PLUS_ONE)
        second = _normed(high, factor, is_q, q_norm, k_norm, half + columns, inside, PLUS_ONE)
        third = _normed(last, factor, is_q, q_norm, k_norm, further, beyond, PLUS_ONE)
        tl.store(start + further[None, :], third, mask=rest & is_q)
    frequency = tl.load(inv_freq + columns, mask=inside, other=0.0).to(tl.float32)
    first, second = _rotated(first, second, tl.load(positions + token).to(tl.float32) * frequency, rope_scaling)
    tl.store(start + columns[None, :], first, mask=both & is_q)
    tl.store(start + half + columns[None, :], second, mask=both & is_q)
    kv = tl.where(head >= heads + kv_heads, head - heads - kv_heads, head - heads)
    place = (((row * kv_heads + kv) * capacity + slot) * SIZE)[:, None]
    of_k = (head >= heads)[:, None] & (head < heads + kv_heads)[:, None]
    tl.store(keys + place + columns[None, :], first, mask=both & of_k)
    tl.store(keys + place + half + columns[None, :], second, mask=both & of_k)
    tl.store(keys + place + further[None, :], third, mask=rest & of_k)
    tl.store(values + place + columns[None, :], low, mask=both & is_v)
    tl.store(values + place + half + columns[None, :], high, mask=both & is_v)
    tl.store(values + place + further[None, :], last, mask=rest & is_v)


def widths(shape: AttentionShape) -> dict[str, int]:
    """Sizes of the kernel: of a head, of its rotated columns, and of the parts that a program holds."""
    rotary = shape.rotary_dim
    rest = triton.next_power_of_2(max(1, shape.size - rotary))
    return {"SIZE": shape.size, "ROTARY": rotary, "WIDE": triton.next_power_of_2(rotary // 2), "REST": rest}


def rotate_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """As the operation; qkv and positions are contiguous, keys and values slots of a contiguous cache."""
    every = shape.heads + 2 * shape.kv_heads
    norms = (qkv if shape.q_norm is None else shape.q_norm, qkv if shape.k_norm is None else shape.k_norm)
    if qkv.shape[0]:
        with on(qkv):
            _rotate[(qkv.shape[0], cdiv(every, HEADS))](
                qkv, positions, shape.inv_freq, *norms, keys, values, positions.shape[1], keys.stride(1) // shape.size,
                shape.heads, shape.kv_heads, shape.rope_scaling, shape.eps, NORM=shape.q_norm is not None,
                PLUS_ONE=shape.plus_one, **widths(shape), HEADS=HEADS, num_warps=WARPS,
            )  # fmt: skip
