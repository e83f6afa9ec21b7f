"""Float arithmetic of vector registers: f32, f16 and f64, and the special functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from accelpatch.jit.emulate.floats import (
    F16,
    F32,
    F64,
    flushed,
    flushing,
    fma,
    fma_double,
    fma_half,
    fract,
    maximum,
    median,
    minimum,
)  # fmt: skip
from accelpatch.jit.emulate.vector import Function, vector
from accelpatch.jit.emulate.wave import Array

TAU = 2 * np.pi


def ldexp(a: Array, by: Array) -> Array:
    """a 2^by, rounded once."""
    return np.ldexp(a.astype(F64), np.clip(by, -4000, 4000)).astype(a.dtype)


def legacy_multiply(a: Array, b: Array) -> Array:
    """Zero times anything is zero."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    return flushed(flushed(flushed(a) * flushed(b)) + flushed(c))


def mantissa(a: Array) -> Array:
    """In [0.5, 1); what is not finite stays."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def exponent(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32)


def half(function: Any) -> Any:
    """A function of float16, computed in float64."""
    return lambda a: function(a.astype(F64)).astype(F16)


def sine(a: Array) -> Array:
    return np.sin(np.remainder(a, 1.0) * TAU)


def cosine(a: Array) -> Array:
    return np.cos(np.remainder(a, 1.0) * TAU)


ROUNDING: dict[str, Function] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rndne": np.rint,
    "fract": fract,
    "frexp_mant": mantissa,
}
SPECIAL: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp2,
    "log": np.log2,
    "rcp": lambda a: 1 / a,
    "rsq": lambda a: 1 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": sine,
    "cos": cosine,
}
ARITHMETIC: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "subrev": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "max": maximum,
    "min": minimum,
}
THREE: dict[str, Function] = {
    "max3": lambda a, b, c: maximum(maximum(a, b), c),
    "min3": lambda a, b, c: minimum(minimum(a, b), c),
    "med3": median,
}

vector("f32: f32", {f"v_{name}_f32": function for name, function in ROUNDING.items()})
vector("f32: f32", {f"v_{name}_f32": flushing(function) for name, function in SPECIAL.items()})
vector("f32: f32", {
    "v_rcp_iflag_f32": flushing(SPECIAL["rcp"]),
    "v_exp_legacy_f32": flushing(np.exp2),
    "v_log_legacy_f32": flushing(np.log2),
})  # fmt: skip
vector("f32: f32 f32", {f"v_{name}_f32": function for name, function in ARITHMETIC.items()})
vector("f32: f32 f32", {"v_mul_legacy_f32": legacy_multiply})
vector("f32: f32 i32", {"v_ldexp_f32": ldexp})
vector("f32: f32 f32 f32", {
    "v_fma_f32": fma,
    **{f"v_{name}_f32": function for name, function in THREE.items()},
})  # fmt: skip
vector("f32: f32 f32 f32", {"v_fmaak_f32": fma, "v_fmamk_f32": fma}, "gfx942 gfx950")
vector("f32: f32 f32 +", {"v_fmac_f32": fma})
MULTIPLY_ADD = "gfx90a"  # has the older instructions, which round the product and know no subnormals
vector("f32: f32 f32 f32", {
    "v_mad_f32": multiply_add, "v_madak_f32": multiply_add, "v_madmk_f32": multiply_add,
}, MULTIPLY_ADD)  # fmt: skip
vector("f32: f32 f32 +", {"v_mac_f32": multiply_add}, MULTIPLY_ADD)
vector("i32: f32", {"v_frexp_exp_i32_f32": exponent})

vector("f16: f16", {f"v_{name}_f16": function for name, function in ROUNDING.items()})
vector("f16: f16", {f"v_{name}_f16": half(function) for name, function in SPECIAL.items()})
vector("f16: f16 f16", {f"v_{name}_f16": function for name, function in ARITHMETIC.items()})
vector("f16: f16 i16", {"v_ldexp_f16": ldexp})
vector("f16: f16 f16 f16", {"v_fma_f16": fma_half, **{f"v_{name}_f16": function for name, function in THREE.items()}},
       preserve=True)  # fmt: skip
vector("f16: f16 f16 f16", {"v_fma_legacy_f16": fma_half})
vector("i16: f16", {"v_frexp_exp_i16_f16": lambda a: exponent(a).astype(np.int16)})

vector("f64: f64", {f"v_{name}_f64": function for name, function in ROUNDING.items()})
vector("f64: f64", {f"v_{name}_f64": SPECIAL[name] for name in ("rcp", "rsq", "sqrt")})
vector("f64: f64 f64", {f"v_{name}_f64": ARITHMETIC[name] for name in ("add", "mul", "max", "min")})
vector("f64: f64 i32", {"v_ldexp_f64": ldexp})
vector("f64: f64 f64 f64", {"v_fma_f64": fma_double})
vector("f64: f64 f64 +", {"v_fmac_f64": fma_double})
vector("i32: f64", {"v_frexp_exp_i32_f64": exponent})
