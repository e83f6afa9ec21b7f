"""The three instructions of a float division: scale the operands, finish with the scale, fix up the special cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from accelpatch.jit.emulate.floats import F32, F64, fma, fma_double
from accelpatch.jit.emulate.operands import VCC
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import read, write, write_mask
from accelpatch.jit.emulate.vector import vector
from accelpatch.jit.emulate.wave import Array, Wave, lanes_of


@dataclass(frozen=True)
class Format:
    """far, underflow: differences of exponents beyond which a quotient may overflow, or is zero. by: of the scale."""

    dtype: type
    raw: type
    mantissa: int
    largest: int
    far: int
    underflow: int
    tiny: int
    by: int
    fma: Callable[[Array, Array, Array], Array]


FORMATS = {
    "f32": Format(F32, np.uint32, 23, 255, 96, -150, 23, 64, fma),
    "f64": Format(F64, np.uint64, 52, 2047, 768, -1075, 53, 128, fma_double),
}


def exponents(f: Format, a: Array) -> Array:
    """The biased exponents, as signed integers."""
    return (a.view(f.raw) >> f.raw(f.mantissa) & f.raw(f.largest)).astype(np.int64)


def subnormal(f: Format, a: Array) -> Array:
    return (exponents(f, a) == 0) & (a != 0)


def scale(f: Format, a: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale: a (one of the other two) so scaled that the steps between neither overflow nor lose bits.

    The flag says that v_div_fmas must scale the result.
    """
    a, denominator, numerator = np.broadcast_arrays(a, denominator, numerator)
    a, denominator, numerator = a.copy(), denominator.copy(), numerator.copy()
    up, down = np.ldexp(a, f.by), np.ldexp(a, -f.by)
    one = f.dtype(1)
    bad = (numerator == 0) | (denominator == 0)
    far = exponents(f, numerator) - exponents(f, denominator) >= f.far
    small_denominator = subnormal(f, denominator)
    small_reciprocal = subnormal(f, one / denominator)
    small_quotient = subnormal(f, numerator / denominator)
    is_denominator, is_numerator = a == denominator, a == numerator
    cases = [
        (bad, f.dtype(np.nan), False),
        (far, np.where(is_denominator, up, a), True),
        (small_denominator, up, False),
        (small_reciprocal & small_quotient, np.where(is_denominator, up, a), True),
        (small_reciprocal, down, False),
        (small_quotient, np.where(is_numerator, up, a), True),
        (exponents(f, numerator) <= f.tiny, up, False),
    ]
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], a).astype(f.dtype)
    return value, np.select(conditions, [case[2] for case in cases], False).astype(bool)


def fixup(f: Format | None, quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup: the quotient, or what a division by zero, of zero, of infinities and of NaN gives.

    A quotient that is no number though the operands are has overflowed on the way (the ISA document leaves this out).
    """
    dtype = quotient.dtype.type
    a, b = denominator, numerator
    sign = np.signbit(a) ^ np.signbit(b)
    infinity, zero = np.where(sign, -dtype(np.inf), dtype(np.inf)), np.where(sign, -dtype(0), dtype(0))
    cases = [
        (np.isnan(b), b),
        (np.isnan(a), a),
        ((a == 0) & (b == 0) | np.isinf(a) & np.isinf(b), -dtype(np.nan)),
        ((a == 0) | np.isinf(b), infinity),
        (np.isinf(a) | (b == 0), zero),
    ]
    if f is not None:
        cases.append((exponents(f, b) - exponents(f, a) < f.underflow, zero))
        cases.append((np.isnan(quotient), infinity))
    signed = np.where(sign, -np.abs(quotient), np.abs(quotient))
    conditions = np.broadcast_arrays(*[case[0] for case in cases], signed)[:-1]
    return np.select(list(conditions), [case[1] for case in cases], signed).astype(dtype)


def fmas(f: Format, kind: str, d: Decoding) -> Step:
    """v_div_fmas: the fused multiply-add, scaled where vcc says so, by the direction that the addend's size shows."""
    destination = d.operand()
    a, b, c = (read(d, d.operand(), kind, number) for number in range(3))
    store = write(d, destination, kind)
    d.reads += [VCC, VCC + 1]
    half = f.largest // 2

    def execute(w: Wave) -> None:
        x, y, z = a(w), b(w), c(w)
        value = np.broadcast_to(f.fma(x, y, z), 64)
        large = np.broadcast_to(exponents(f, z) > half, 64)
        scaled = np.ldexp(value, np.where(large, f.by, -f.by)).astype(f.dtype)
        store(w, np.where(lanes_of(w.s[VCC] | w.s[VCC + 1] << 32), scaled, value))

    return execute


def build_scale(f: Format, kind: str, d: Decoding) -> Step:
    destination, flags = d.operand(), d.operand()
    readers = [read(d, d.operand(), kind, number) for number in range(3)]
    store, store_flags = write(d, destination, kind), write_mask(d, flags)

    def execute(w: Wave) -> None:
        value, mask = scale(f, *[one(w) for one in readers])
        store(w, value)
        store_flags(w, mask)

    return execute


for _kind, _format in FORMATS.items():
    add(f"v_div_scale_{_kind}", partial(build_scale, _format, _kind))
    add(f"v_div_fmas_{_kind}", partial(fmas, _format, _kind))
    vector(f"{_kind}: {_kind} {_kind} {_kind}", {f"v_div_fixup_{_kind}": partial(fixup, _format)})
vector("f16: f16 f16 f16", {"v_div_fixup_f16": partial(fixup, None)}, preserve=True)
