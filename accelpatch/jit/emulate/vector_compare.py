"""Vector comparisons: a lane mask into a scalar pair, and with v_cmpx into exec as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from accelpatch.jit.emulate.operands import EXEC
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import read, write_mask
from accelpatch.jit.emulate.wave import Array, Wave, bits_of

Test = Callable[[Array, Array], Array]


def unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


INTEGER_TESTS: dict[str, Test] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}
FLOAT_TESTS: dict[str, Test] = {
    "f": INTEGER_TESTS["f"],
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~unordered(a, b),
    "u": unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "tru": INTEGER_TESTS["t"],
}
#: kind -> (unsigned type, bits of the mantissa)
FORMATS = {"f16": (np.uint16, 10), "f32": (np.uint32, 23), "f64": (np.uint64, 52)}


def float_class(kind: str, a: Array, tested: Array) -> Array:
    """v_cmp_class: whether a is of one of the classes whose bits are set, from signalling NaN to +infinity."""
    raw, mantissa_bits = FORMATS[kind]
    bits = a.view(raw)
    size = bits.dtype.itemsize * 8
    mantissa = bits & raw((1 << mantissa_bits) - 1)
    largest = (1 << size - 1 - mantissa_bits) - 1
    exponent = bits >> raw(mantissa_bits) & raw(largest)
    positive = bits >> raw(size - 1) == 0
    nan = (exponent == largest) & (mantissa != 0)
    quiet = (mantissa >> raw(mantissa_bits - 1)) != 0
    infinite, zero = (exponent == largest) & (mantissa == 0), (exponent == 0) & (mantissa == 0)
    subnormal = (exponent == 0) & (mantissa != 0)
    step = np.where(infinite, 0, np.where(subnormal, 2, np.where(zero, 3, 1)))
    place = np.where(nan, np.where(quiet, 1, 0), np.where(positive, 9 - step, 2 + step))
    return (tested.astype(np.uint32) >> place.astype(np.uint32) & np.uint32(1)).astype(bool)


def build(test: Test, kinds: tuple[str, str], to_exec: bool, d: Decoding) -> Step:
    store = write_mask(d, d.operand())
    d.flag("clamp")
    a, b = (read(d, d.operand(), kind, number) for number, kind in enumerate(kinds))
    if not to_exec:
        return lambda w: store(w, test(a(w), b(w)))
    d.writes += [EXEC, EXEC + 1]

    def execute(w: Wave) -> None:
        lanes = np.broadcast_to(test(a(w), b(w)), 64) & w.mask
        store(w, lanes)
        w.set_exec(bits_of(lanes))

    return execute


def register() -> None:
    for prefix, to_exec in (("v_cmp", False), ("v_cmpx", True)):
        for kind in ("u16", "i16", "u32", "i32", "u64", "i64"):
            for name, test in INTEGER_TESTS.items():
                add(f"{prefix}_{name}_{kind}", partial(build, test, (kind, kind), to_exec))
        for kind in FORMATS:
            for name, test in FLOAT_TESTS.items():
                add(f"{prefix}_{name}_{kind}", partial(build, test, (kind, kind), to_exec))
            add(f"{prefix}_class_{kind}", partial(build, partial(float_class, kind), (kind, "u32"), to_exec))


register()
