"""Typed access to vector operands: closures that read an operand of a wave as a numpy array, and write one.

Types: u32 i32 f32 u64 i64 f64, u16 i16 f16 (16-bit ones lie in a register's low half). A value has the shape (64,), or
(1,) where it is the same for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from accelpatch.jit.emulate.integers import WORDS, constant, evaluate, read_integer, write_integer
from accelpatch.jit.emulate.lane_selects import destination_select, source_select
from accelpatch.jit.emulate.operands import VGPR, Operand
from accelpatch.jit.emulate.registry import Decoding
from accelpatch.jit.emulate.wave import ALL, Array, Wave, bits_of, lanes_of

Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array], None]

DTYPES: dict[str, type] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip
INTEGERS_OF = {"f16": "u16", "f32": "u32", "f64": "u64"}


def read_mask(d: Decoding, operand: Operand) -> Reader:
    """Reader of a lane mask in a scalar pair, as bool[64]."""
    read = read_integer(d, operand, "u64")
    return lambda w: lanes_of(read(w) & ALL)


def write_mask(d: Decoding, operand: Operand) -> Writer:
    """Writer of a lane mask: lanes that exec leaves out are zero in it."""
    write = write_integer(d, operand, 2)
    return lambda w, lanes: write(w, bits_of(lanes & w.mask) if lanes.shape == (64,) else (w.exec if lanes[0] else 0))


def register_reader(register: int, kind: str, high: bool = False) -> Reader:
    """Reader of a vector register (row of wave.u32 and its views) by type; high: the upper half of 16-bit types."""
    row, dtype = register - VGPR, DTYPES[kind]
    if kind == "u32":
        return lambda w: w.u32[row]
    if kind == "i32":
        return lambda w: w.i32[row]
    if kind == "f32":
        return lambda w: w.f32[row]
    if WORDS[kind] == 2:

        def pair(w: Wave) -> Array:
            out = np.empty((64, 2), np.uint32)
            out[:, 0], out[:, 1] = w.u32[row], w.u32[row + 1]
            return out.view(dtype)[:, 0]

        return pair
    if high:
        return lambda w: w.high_u16[row].view(dtype)
    return lambda w: w.u16[row].view(dtype)


def read(d: Decoding, operand: Operand, kind: str, source: int = -1) -> Reader:
    """Reader of a vector instruction's source operand, with its negation and absolute value.

    source: the number of the source, where DPP, SDWA or op_sel may select parts of it; -1: never.
    """
    if operand.kind == "register" and operand.count != WORDS[kind]:
        raise d.line.fault(f"{operand.text} has {operand.count} registers, and must have {WORDS[kind]}")
    high = source >= 0 and kind[1:] == "16" and bool(d.bits("op_sel", [0, 0, 0, 0])[source])
    if not operand.vector:
        return modified(d, operand, kind, _read_same(d, operand, kind, source, high))
    d.reading(operand)
    if d.modifier(f"src{source}_sel") is None:
        made = source_select(d, operand, source, register_reader(operand.register, kind, high))
    else:
        made = _narrowed(source_select(d, operand, source, register_reader(operand.register, "u32")), kind)
    return modified(d, operand, kind, made)


def _narrowed(made: Reader, kind: str) -> Reader:
    """32 bits as a type: of 16-bit ones the low half."""
    dtype = DTYPES[kind]
    if kind[1:] == "16":
        return lambda w: made(w).astype(np.uint16).view(dtype)
    return lambda w: made(w).view(dtype)


def _read_same(d: Decoding, operand: Operand, kind: str, source: int, high: bool) -> Reader:
    """Reader, of shape (1,), of what is the same for all lanes: scalar registers and constants."""
    dtype = DTYPES[kind]
    size = np.dtype(dtype).itemsize
    shift, cut, raw = 16 * high, (1 << size * 8) - 1, f"u{size}"
    if operand.kind in ("register", "special"):
        integer = read_integer(d, operand, "u64" if size == 8 else "u32")
        if d.modifier(f"src{source}_sel") is None:
            return lambda w: np.array([integer(w) >> shift & cut], raw).view(dtype)
        whole: Reader = lambda w: np.array([integer(w)], np.uint32)  # noqa: E731
        return _narrowed(source_select(d, operand, source, whole), kind)
    bits = constant(d, operand, kind) if operand.kind != "expression" else evaluate(d, operand.text)
    d.modifier(f"src{source}_sel")
    fixed: Array = np.array([bits >> shift & cut], raw).view(dtype)
    return lambda w: fixed


def modified(d: Decoding, operand: Operand, kind: str, made: Reader) -> Reader:
    """The reader with |x| and -x, which change the sign bit alone, also of NaN."""
    if not (operand.negative or operand.absolute):
        return made
    if kind[0] != "f":
        raise d.line.fault(f"{operand.text}: it takes integers, which have no such modifier")
    raw, dtype = DTYPES[INTEGERS_OF[kind]], DTYPES[kind]
    top: Array = np.array([1 << np.dtype(dtype).itemsize * 8 - 1], raw)
    keep, flip = ~top, top if operand.negative else np.zeros(1, raw)
    if operand.absolute:
        return lambda w: ((made(w).view(raw) & keep) ^ flip).view(dtype)
    return lambda w: (made(w).view(raw) ^ flip).view(dtype)


def write(d: Decoding, operand: Operand, kind: str, preserve: bool = False, sources: int = -1) -> Writer:
    """Writer of a vector register (pair) in the lanes of exec.

    16-bit types: the upper half becomes zero, as most instructions of gfx9 have it, or with `preserve` stays. sources:
    how many there are, where op_sel has one bit more, which writes the upper half and preserves the lower one.
    """
    words, dtype = WORDS[kind], DTYPES[kind]
    if operand.count != words or not operand.vector:
        raise d.line.fault(f"{operand.text} must be {words} vector register{'s' * (words > 1)}")
    register = d.writing(operand).register
    row = register - VGPR
    if kind[1:] == "16":
        store = _half_writer(row, preserve, sources >= 0 and bool(d.bits("op_sel", [0] * 4)[sources]))
    elif words == 1:
        store = _word_writer(row)
    else:
        store = _pair_writer(row)
    if d.modifier("dst_sel") is not None and kind[1:] == "16":
        word = destination_select(d, _word_writer(row), register_reader(register, "u32"))
        store = lambda w, value: word(w, value.view(np.uint16).astype(np.uint32))  # noqa: E731
    elif d.modifier("dst_sel") is not None:
        word = destination_select(d, _word_writer(row), register_reader(register, "u32"))
        store = lambda w, value: word(w, value.view(np.uint32))  # noqa: E731
    else:
        store = destination_select(d, store, register_reader(register, "u32"))
    return output_modified(d, kind, store, dtype)


def output_modified(d: Decoding, kind: str, store: Writer, dtype: type) -> Writer:
    """The writer with clamp, which brings floats to between 0 and 1 (NaN becomes 0)."""
    if d.modifier("mul") or d.modifier("div"):
        raise d.line.fault("the hardware ignores mul: and div: where subnormals are kept: multiply instead")
    if kind[0] != "f" or not d.flag("clamp"):
        return store
    return lambda w, value: store(w, np.where(np.isnan(value), dtype(0), np.clip(value, dtype(0), dtype(1))))


def _word_writer(row: int) -> Writer:
    def store(w: Wave, value: Array) -> None:
        value = value.view(np.uint32)
        if w.full:
            w.u32[row] = value
        else:
            np.copyto(w.u32[row], value, where=w.mask)

    return store


def _pair_writer(row: int) -> Writer:
    def store(w: Wave, value: Array) -> None:
        halves = np.ascontiguousarray(np.broadcast_to(value, 64)).view(np.uint32).reshape(64, 2)
        np.copyto(w.u32[row], halves[:, 0], where=w.mask)
        np.copyto(w.u32[row + 1], halves[:, 1], where=w.mask)

    return store


def _half_writer(row: int, preserve: bool, high: bool) -> Writer:
    def store(w: Wave, value: Array) -> None:
        value = value.view(np.uint16)
        if high:
            np.copyto(w.high_u16[row], value, where=w.mask)
        elif preserve:
            np.copyto(w.u16[row], value, where=w.mask)
        else:
            np.copyto(w.u32[row], value.astype(np.uint32), where=w.mask)

    return store
