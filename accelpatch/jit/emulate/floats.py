"""Float arithmetic as the hardware rounds it: once, to nearest even; and special functions, without subnormals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from accelpatch.jit.emulate.wave import Array

F16, F32, F64 = np.float16, np.float32, np.float64
SMALLEST = F32(2.0**-126)


def rounded_to_odd(a: Array, b: Array) -> Array:
    """The float64 sum of two float64, where it is inexact with the last bit set: rounding it again is then correct."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    bits = total.view(np.int64).copy()
    inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (lost > 0) == (total > 0)
    bits[inexact] += np.where(away, 1, -1)[inexact]
    return bits.view(F64)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 a b + c, rounded once: the product is exact in float64."""
    product = a.astype(F64) * b.astype(F64)
    product, addend = np.broadcast_arrays(product, c.astype(F64))
    return rounded_to_odd(product, addend).astype(F32)


def fma_half(a: Array, b: Array, c: Array) -> Array:
    """float16 a b + c, rounded once."""
    product = a.astype(F64) * b.astype(F64)
    product, addend = np.broadcast_arrays(product, c.astype(F64))
    return rounded_to_odd(product, addend).astype(F16)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """float64 a b + c, rounded once, by exact fractions."""
    a, b, c = np.broadcast_arrays(a, b, c)
    plain = a * b + c
    out = plain.copy()
    for at in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            out[at] = _nearest(exact)
    return out


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)  # the division of integers is rounded correctly
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def flushed(a: Array) -> Array:
    """float32 with subnormals as zeros of their sign."""
    return np.where(np.abs(a) < SMALLEST, np.copysign(F32(0), a), a)


def flushing(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function of float32, computed in float64, that takes and gives no subnormals, as v_exp_f32 and its like do."""
    return lambda a: flushed(function(flushed(a).astype(F64)).astype(F32))


def maximum(a: Array, b: Array) -> Array:
    """The larger, and of a NaN and a number the number; +0 is larger than -0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def median(a: Array, b: Array, c: Array) -> Array:
    """v_med3: with a NaN among them the smallest of the numbers."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(nan, minimum(minimum(a, b), c), middle)


def to_integer(a: Array, low: int, high: int, dtype: type) -> Array:
    """Truncated and saturated; NaN becomes 0."""
    value = np.nan_to_num(a.astype(F64), nan=0.0, posinf=float(high), neginf=float(low))
    return np.clip(np.trunc(value), float(low), float(high)).astype(np.int64).astype(dtype)


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(F32)


def f32_to_bf16(a: Array) -> Array:
    """uint16 bits, rounded to nearest even; NaN stays NaN, quiet."""
    bits = np.ascontiguousarray(a, F32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)


def fract(a: Array) -> Array:
    """a - floor(a), below 1."""
    return np.minimum(a - np.floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0)))


def to_half_towards_zero(a: Array) -> Array:
    """float32 to float16, rounded towards zero: what v_cvt_pkrtz_f16_f32 does."""
    half = a.astype(F16)
    over = (np.abs(half.astype(F32)) > np.abs(a)) & np.isfinite(a)
    return np.where(over, np.nextafter(half, F16(0)), half)
