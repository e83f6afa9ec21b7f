"""RMSNorm and rotary embedding of heads inside a kernel, rounded where transformers rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cos_sin(angle):  # type: ignore[no-untyped-def]
    """cos and sin of float32 radians, without the library's branches, which would need registers for a whole tile.

    Range reduction by quarter turns in three parts (Cody and Waite 1980); polynomials of Moshier's Cephes.
    """
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = angle - quarters * 1.5703125
    x = x - quarters * 4.837512969970703125e-4
    x = x - quarters * 7.54978995489188216e-8
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    quadrant = quarters.to(tl.int32) & 3
    swapped, down, left = (quadrant & 1) == 1, quadrant >= 2, (quadrant == 1) | (quadrant == 2)
    some, other = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where(left, -some, some), tl.where(down, -other, other)


@triton.jit
def angles(  # type: ignore[no-untyped-def]
    position, here, inv_freq, scaling, columns, ROTARY_DIM: tl.constexpr, kind: tl.constexpr
):
    """Cosine and sine [rows, columns] of the positions at these pointers, rounded to the activations' dtype."""
    frequency = tl.load(inv_freq + columns % (ROTARY_DIM // 2)).to(tl.float32)
    at = tl.load(position, mask=here, other=0).to(tl.float32)
    cos, sin = _cos_sin(at[:, None] * frequency[None, :])
    return (cos * scaling).to(kind).to(tl.float32), (sin * scaling).to(kind).to(tl.float32)


@triton.jit
def normed(value, factor, weight, PLUS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of values times factor and weight, rounded where transformers rounds."""
    kind: tl.constexpr = value.dtype
    wide = value.to(tl.float32) * factor[:, None]
    if PLUS_ONE:
        return (wide * (weight.to(tl.float32) + 1.0)[None, :]).to(kind)
    return (wide.to(kind).to(tl.float32) * weight.to(tl.float32)[None, :]).to(kind)


@triton.jit
def pair(x, here, columns, SIZE: tl.constexpr, ROTARY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of heads at x, and for each value the one that it is rotated with."""
    others = tl.where(columns < ROTARY_DIM // 2, columns + ROTARY_DIM // 2, columns - ROTARY_DIM // 2)
    others = tl.where(columns < ROTARY_DIM, others, columns)
    both = here[:, None] & (columns < SIZE)[None, :]
    value = tl.load(x[:, None] + columns[None, :], mask=both, other=0.0)
    return value, tl.load(x[:, None] + others[None, :], mask=both, other=0.0), others


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    value, other, others, columns, cos, sin, weight, eps,
    SIZE: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Rows of q or k, normalised if NORM, with rotary embedding; rounded to their dtype where transformers rounds."""
    kind: tl.constexpr = value.dtype
    if NORM:
        wide, inside = value.to(tl.float32), columns < SIZE
        factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
        value = normed(value, factor, tl.load(weight + columns, mask=inside, other=0.0), PLUS_ONE)
        other = normed(other, factor, tl.load(weight + others, mask=inside, other=0.0), PLUS_ONE)
    straight = (value.to(tl.float32) * cos).to(kind).to(tl.float32)
    across = (other.to(tl.float32) * sin).to(kind).to(tl.float32)
    done = (straight + tl.where((columns < ROTARY_DIM // 2)[None, :], -across, across)).to(kind)
    return tl.where((columns < ROTARY_DIM)[None, :], done, value)
