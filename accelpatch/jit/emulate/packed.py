"""Packed arithmetic: two 16-bit values in a register, or two floats in a pair; and multiply-add of mixed precision.

op_sel and op_sel_hi choose, for the low and the high result, which half of each source it takes; neg_lo and neg_hi
negate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from accelpatch.jit.emulate.floats import F16, F32, fma, fma_half, maximum, minimum
from accelpatch.jit.emulate.integers import constant
from accelpatch.jit.emulate.operands import Operand
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import Reader, modified, read, write
from accelpatch.jit.emulate.wave import Array, Wave

U16, U32, I64 = np.uint16, np.uint32, np.int64
Function = Callable[..., Any]
LOW = [0, 0, 0, 0]


def word(d: Decoding, operand: Operand) -> Reader:
    """A source's 32 bits; a float constant is a half in the low 16."""
    if operand.kind == "float":
        fixed: Array = np.array([constant(d, operand, "f16")], U32)
        return lambda w: fixed
    return read(d, operand, "u32")


def half_of(made: Reader, high: int, kind: str, negate: int) -> Reader:
    """One 16-bit value of a word."""
    shift, flip = U32(16 * high), U16(0x8000 * negate)
    dtype = {"f16": F16, "u16": np.uint16, "i16": np.int16}[kind]
    return lambda w: ((made(w) >> shift).astype(U16) ^ flip).view(dtype)


def selections(d: Decoding, sources: int) -> list[tuple[list[int], list[int]]]:
    """Of the low result, and of the high one: which halves it takes, and which it negates."""
    high = d.bits("op_sel_hi", [1] * sources)
    return [(d.bits("op_sel", LOW), d.bits("neg_lo", LOW)), (high, d.bits("neg_hi", LOW))]


def packed_half(function: Function, kind: str, sources: int, accumulates: bool, d: Decoding) -> Step:
    destination = d.operand()
    words = [word(d, d.operand()) for _ in range(sources - accumulates)]
    if accumulates:
        words.append(read(d, destination, "u32"))
    store, clamp = write(d, destination, "u32"), d.flag("clamp")
    readers = [
        [half_of(words[n], halves[n], kind, negations[n]) for n in range(sources)]
        for halves, negations in selections(d, sources)
    ]
    finish = _float_result if kind == "f16" else partial(_integer_result, kind)

    def execute(w: Wave) -> None:
        low, high = (finish(function(*[one(w) for one in each]), clamp) for each in readers)
        store(w, low.astype(U32) | high.astype(U32) << U32(16))

    return execute


def _float_result(value: Array, clamp: bool) -> Array:
    value = value.astype(F16)
    return (np.where(np.isnan(value), F16(0), np.clip(value, F16(0), F16(1))) if clamp else value).view(U16)


def _integer_result(kind: str, value: Array, clamp: bool) -> Array:
    if clamp:
        low, high = (0, 65535) if kind == "u16" else (-32768, 32767)
        value = np.clip(value, low, high)
    return value.astype(I64).astype(U16)


def wide(function: Function) -> Function:
    """A function of integers without overflow."""
    return lambda *values: function(*[one.astype(I64) for one in values])


def packed_float(function: Function, sources: int, d: Decoding) -> Step:
    """Of two f32 in a pair each."""
    destination = d.operand()
    operands = [d.operand() for _ in range(sources)]
    store = write(d, destination, "u64")
    pairs = [float_pair(d, operand) for operand in operands]
    chosen = selections(d, sources)
    for halves, _ in chosen:
        for operand, half in zip(operands, halves, strict=False):
            if half and operand.kind != "register":
                raise d.line.fault(f"{operand.text} has no high half: set op_sel_hi to 0 for it")

    def execute(w: Wave) -> None:
        values = [one(w) for one in pairs]
        results = []
        for halves, negations in chosen:
            taken = [value[:, half] for value, half in zip(values, halves, strict=False)]
            signed = [-one if negate else one for one, negate in zip(taken, negations, strict=False)]
            results.append(np.broadcast_to(function(*signed), 64))
        pair = np.stack(results, axis=1).astype(F32)
        store(w, pair.view(np.uint64)[:, 0])

    return execute


def float_pair(d: Decoding, operand: Operand) -> Callable[[Wave], Array]:
    """float32[64 or 1, 2]."""
    if operand.kind == "register":
        pair = read(d, operand, "u64")
        return lambda w: np.ascontiguousarray(pair(w)).view(F32).reshape(-1, 2)
    single = read(d, operand, "f32")
    return lambda w: np.repeat(single(w), 2).reshape(-1, 2)


def move_pair(d: Decoding) -> Step:
    """v_pk_mov_b32: a word of the first source's pair below, one of the second's above."""
    destination = d.operand()
    a, b = float_pair(d, d.operand()), float_pair(d, d.operand())
    store, halves = write(d, destination, "u64"), d.bits("op_sel", LOW)
    d.bits("op_sel_hi", LOW)

    def execute(w: Wave) -> None:
        pair = np.empty((64, 2), F32)
        pair[:, 0], pair[:, 1] = a(w)[:, halves[0]], b(w)[:, halves[1]]
        store(w, pair.view(np.uint64)[:, 0])

    return execute


def mixed(result: str, d: Decoding) -> Step:
    """v_fma_mix: sources are f32, or the half of a word that op_sel says where op_sel_hi is set."""
    destination = d.operand()
    halves, narrow = d.bits("op_sel", LOW), d.bits("op_sel_hi", LOW)
    readers = [_mixed_source(d, d.operand(), narrow[n], halves[n]) for n in range(3)]
    if result == "f32":
        store = write(d, destination, "f32")
        return lambda w: store(w, fma(*[one(w) for one in readers]))
    d.modifiers["op_sel"] = f"[0,0,0,{int(result == 'high')}]"
    store = write(d, destination, "f16", preserve=True, sources=3)
    return lambda w: store(w, fma(*[one(w) for one in readers]).astype(F16))


def _mixed_source(d: Decoding, operand: Operand, narrow: int, high: int) -> Reader:
    if not narrow:
        return read(d, operand, "f32")
    half = half_of(word(d, operand), high, "f16", 0)
    return modified(d, operand, "f32", lambda w: half(w).astype(F32))


FLOATS: dict[str, tuple[Function, int]] = {
    "v_pk_add_f16": (lambda a, b: a + b, 2),
    "v_pk_mul_f16": (lambda a, b: a * b, 2),
    "v_pk_max_f16": (maximum, 2),
    "v_pk_min_f16": (minimum, 2),
    "v_pk_fma_f16": (fma_half, 3),
}
INTEGERS: dict[str, tuple[Function, int]] = {
    "v_pk_add_{}": (lambda a, b: a + b, 2),
    "v_pk_sub_{}": (lambda a, b: a - b, 2),
    "v_pk_max_{}": (np.maximum, 2),
    "v_pk_min_{}": (np.minimum, 2),
    "v_pk_mad_{}": (lambda a, b, c: a * b + c, 3),
}
for _name, (_function, _sources) in FLOATS.items():
    add(_name, partial(packed_half, _function, "f16", _sources, False))
add("v_pk_fmac_f16", partial(packed_half, fma_half, "f16", 3, True))
for _kind in ("u16", "i16"):
    for _name, (_function, _sources) in INTEGERS.items():
        add(_name.format(_kind), partial(packed_half, wide(_function), _kind, _sources, False))
add("v_pk_mul_lo_u16", partial(packed_half, wide(lambda a, b: a * b), "u16", 2, False))
add("v_pk_lshlrev_b16", partial(packed_half, wide(lambda a, b: b << (a & 15)), "u16", 2, False))
add("v_pk_lshrrev_b16", partial(packed_half, wide(lambda a, b: b >> (a & 15)), "u16", 2, False))
add("v_pk_ashrrev_i16", partial(packed_half, wide(lambda a, b: b >> (a & 15)), "i16", 2, False))
add("v_pk_add_f32", partial(packed_float, lambda a, b: a + b, 2))
add("v_pk_mul_f32", partial(packed_float, lambda a, b: a * b, 2))
add("v_pk_fma_f32", partial(packed_float, fma, 3))
add("v_pk_mov_b32", move_pair)
add("v_fma_mix_f32", partial(mixed, "f32"))
add("v_fma_mixlo_f16", partial(mixed, "low"))
add("v_fma_mixhi_f16", partial(mixed, "high"))
