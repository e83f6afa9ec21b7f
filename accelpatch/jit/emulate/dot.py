"""Dot products of the halves, bytes and nibbles of two registers, added to a third."""

from __future__ import annotations

from functools import partial

import numpy as np

from accelpatch.jit.emulate.floats import F16, F32, F64, bf16_to_f32
from accelpatch.jit.emulate.packed import LOW, word
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import Reader, read, write
from accelpatch.jit.emulate.wave import Array, Wave


def flushed_half(a: Array) -> Array:
    """float16 without subnormals: gfx90a's dot products and matrix instructions have none."""
    return np.where(np.abs(a) < F16(2.0**-14), F16(0), a)


def parts(kind: str, a: Array, arch: str) -> list[Array]:
    """The values in a word, the lowest first: exact in int64 or float64."""
    if kind[0] in "iu":
        bits = int(kind[1:])
        values = [(a >> np.uint32(at)).astype(np.int64) & ((1 << bits) - 1) for at in range(0, 32, bits)]
        return [one - (one >> bits - 1 << bits) if kind[0] == "i" else one for one in values]
    halves = [(a >> np.uint32(at)).astype(np.uint16) for at in (0, 16)]
    if kind == "bf16":
        return [bf16_to_f32(one).astype(F64) for one in halves]
    floats = [one.view(F16) for one in halves]
    return [(flushed_half(one) if arch == "gfx90a" else one).astype(F64) for one in floats]


def negated(d: Decoding, number: int, values: list[Array], kind: str) -> list[Array]:
    if kind[0] in "iu":
        return values
    signs = [d.bits("neg_lo", LOW)[number], d.bits("neg_hi", LOW)[number]]
    return [-one if sign else one for one, sign in zip(values, signs, strict=True)]


def dot(kind: str, result: str, accumulates: bool, d: Decoding) -> Step:
    destination = d.operand()
    a, b = word(d, d.operand()), word(d, d.operand())
    c: Reader = read(d, destination if accumulates else d.operand(), result)
    store, clamp, arch = write(d, destination, result), d.flag("clamp"), d.arch
    for name in ("op_sel", "op_sel_hi"):
        if d.modifier(name) not in (None, "[0,0,0]", "[1,1,1]", "[1,1,0]"):
            raise d.line.fault(f"the emulator does not know {name} here")
    d.bits("neg_lo", LOW), d.bits("neg_hi", LOW)
    low, high = (0, (1 << 32) - 1) if result == "u32" else (-(1 << 31), (1 << 31) - 1)

    def execute(w: Wave) -> None:
        x, y = negated(d, 0, parts(kind, a(w), arch), kind), negated(d, 1, parts(kind, b(w), arch), kind)
        products = sum(one * other for one, other in zip(x, y, strict=True))
        if result == "f32":
            store(w, (products + c(w).astype(F64)).astype(F32))
            return
        total = products + c(w).astype(np.int64)
        total = np.clip(total, low, high) if clamp and not accumulates else total
        store(w, total.astype(np.uint32 if result == "u32" else np.int32))

    return execute


for _name, _kind, _result, _archs in (
    ("dot2_f32_f16", "f16", "f32", ""),
    ("dot2_f32_bf16", "bf16", "f32", "gfx950"),
    ("dot2_i32_i16", "i16", "i32", ""),
    ("dot2_u32_u16", "u16", "u32", ""),
    ("dot4_i32_i8", "i8", "i32", ""),
    ("dot4_u32_u8", "u8", "u32", ""),
    ("dot8_i32_i4", "i4", "i32", ""),
    ("dot8_u32_u4", "u4", "u32", ""),
):
    add(f"v_{_name}", partial(dot, _kind, _result, False), _archs)
for _name, _kind, _result, _archs in (
    ("dot2c_f32_f16", "f16", "f32", ""),
    ("dot2c_f32_bf16", "bf16", "f32", "gfx950"),
    ("dot2c_i32_i16", "i16", "i32", ""),
    ("dot4c_i32_i8", "i8", "i32", ""),
    ("dot8c_i32_i4", "i4", "i32", ""),
):
    add(f"v_{_name}", partial(dot, _kind, _result, True), _archs)
