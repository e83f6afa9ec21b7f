"""Conversions between number formats, and packing of halves."""

from __future__ import annotations

from functools import partial

import numpy as np

from accelpatch.jit.emulate.floats import F16, F32, F64, f32_to_bf16, to_half_towards_zero, to_integer
from accelpatch.jit.emulate.vector import vector
from accelpatch.jit.emulate.wave import Array

U16, I16, U32, I32 = np.uint16, np.int16, np.uint32, np.int32
INT, UINT = (-(1 << 31), (1 << 31) - 1, I32), (0, (1 << 32) - 1, U32)


def packed(low: Array, high: Array) -> Array:
    """Two 16-bit values as one word."""
    low, high = np.broadcast_arrays(low, high)
    return low.copy().view(U16).astype(U32) | high.copy().view(U16).astype(U32) << U32(16)


def convert(limits: tuple[int, int, type], a: Array) -> Array:
    return to_integer(a, *limits)


def normalised(low: int, high: int, dtype: type, a: Array, b: Array) -> Array:
    """v_cvt_pknorm: [-1, 1] or [0, 1] to the whole range of 16 bits."""
    return packed(
        *(to_integer(np.rint(np.clip(one.astype(F64), low and -1, 1) * high), low, high, dtype) for one in (a, b))
    )


def byte(number: int, a: Array) -> Array:
    return (a >> U32(8 * number) & U32(255)).astype(F32)


def saturated(low: int, high: int, dtype: type, a: Array, b: Array) -> Array:
    return packed(np.clip(a, low, high).astype(dtype), np.clip(b, low, high).astype(dtype))


vector("f32: f16", {"v_cvt_f32_f16": lambda a: a.astype(F32)})
vector("f16: f32", {"v_cvt_f16_f32": lambda a: a.astype(F16)})
vector("f32: f64", {"v_cvt_f32_f64": lambda a: a.astype(F32)})
vector("f64: f32", {"v_cvt_f64_f32": lambda a: a.astype(F64)})
vector("f32: i32", {"v_cvt_f32_i32": lambda a: a.astype(F32)})
vector("f32: u32", {"v_cvt_f32_u32": lambda a: a.astype(F32),
                    **{f"v_cvt_f32_ubyte{n}": partial(byte, n) for n in range(4)}})  # fmt: skip
vector("f64: i32", {"v_cvt_f64_i32": lambda a: a.astype(F64)})
vector("f64: u32", {"v_cvt_f64_u32": lambda a: a.astype(F64)})
vector("f16: i16", {"v_cvt_f16_i16": lambda a: a.astype(F16)})
vector("f16: u16", {"v_cvt_f16_u16": lambda a: a.astype(F16)})
vector("i32: f32", {
    "v_cvt_i32_f32": partial(convert, INT),
    "v_cvt_rpi_i32_f32": lambda a: convert(INT, np.floor(a.astype(F64) + 0.5)),
    "v_cvt_flr_i32_f32": lambda a: convert(INT, np.floor(a)),
})  # fmt: skip
vector("u32: f32", {"v_cvt_u32_f32": partial(convert, UINT)})
vector("i32: f64", {"v_cvt_i32_f64": partial(convert, INT)})
vector("u32: f64", {"v_cvt_u32_f64": partial(convert, UINT)})
vector("i16: f16", {"v_cvt_i16_f16": partial(convert, (-32768, 32767, I16))})
vector("u16: f16", {"v_cvt_u16_f16": partial(convert, (0, 65535, U16))})
vector("u32: f32 f32", {
    "v_cvt_pkrtz_f16_f32": lambda a, b: packed(to_half_towards_zero(a), to_half_towards_zero(b)),
    "v_cvt_pknorm_i16_f32": partial(normalised, -32767, 32767, I16),
    "v_cvt_pknorm_u16_f32": partial(normalised, 0, 65535, U16),
})  # fmt: skip
vector("u32: f32 f32", {"v_cvt_pk_bf16_f32": lambda a, b: packed(f32_to_bf16(a), f32_to_bf16(b)),
                        "v_cvt_pk_f16_f32": lambda a, b: packed(a.astype(F16), b.astype(F16))}, "gfx950")  # fmt: skip
vector("u32: f16 f16", {"v_pack_b32_f16": packed})
vector("u32: u32 u32", {"v_cvt_pk_u16_u32": partial(saturated, 0, 65535, U16)})
vector("u32: i32 i32", {"v_cvt_pk_i16_i32": partial(saturated, -32768, 32767, I16)})
