"""Scalar loads and stores, and loads of scalar buffers."""

from __future__ import annotations

from functools import partial

import numpy as np

from accelpatch.jit.emulate.integers import IntegerReader, read_integer
from accelpatch.jit.emulate.memory import OutOfBounds
from accelpatch.jit.emulate.operands import VGPR
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.wave import Wave

SIZES = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def offset_of(d: Decoding) -> IntegerReader:
    """A register, a constant, or a register and the modifier offset; bytes. It is the last operand."""
    operand = d.operand()
    for flag in ("glc", "nt", "sc0", "sc1"):
        d.flag(flag)
    base = read_integer(d, operand, "u32" if operand.kind == "register" else "i32")
    extra = d.number("offset")
    return (lambda w: base(w) + extra) if extra else base


def fault(d: Decoding, address: int, error: OutOfBounds) -> Exception:
    words = "is read-only" if error.read_only else f"is out of bounds: {error.words}"
    return d.line.fault(f"the scalar address {address:#x} {words}")


def aligned(d: Decoding, address: int) -> int:
    """The hardware drops the two low bits in silence, which nobody means."""
    if address & 3:
        raise d.line.fault(f"the scalar address {address:#x} is misaligned: it must be a multiple of 4 bytes")
    return address


def scalar_load(words: int, buffer: bool, d: Decoding) -> Step:
    destination = d.writing(d.operand(words))
    base_operand = d.reading(d.operand(4 if buffer else 2))
    offset, base, into = offset_of(d), base_operand.register, destination.register
    if into >= VGPR or base >= VGPR:
        raise d.line.fault("it loads into scalar registers, from an address in scalar registers")
    registers, line = tuple(d.writes), d.line

    def execute(w: Wave) -> None:
        by, size = offset(w), 4 * words
        address = aligned(d, (w.s[base] | w.s[base + 1] << 32) + by & (1 << 48 if buffer else 1 << 64) - 1)
        found = size
        if buffer:
            found = min(size, max(0, w.s[base + 2] - by)) & ~3  # what lies behind the buffer's end reads as zero
        try:
            data = w.group.memory.load(np.array([address], np.uint64), found)[0]
        except OutOfBounds as error:
            raise fault(d, address, error) from None
        loaded = np.zeros(words, np.uint32)
        loaded[: found // 4] = data.view(np.uint32)
        for at, word in enumerate(loaded.tolist()):
            w.set_scalar(into + at, word)
        w.waits.add("scalar", line, registers)

    return execute


def scalar_store(words: int, d: Decoding) -> Step:
    source = d.reading(d.operand(words)).register
    base, offset, line = read_integer(d, d.operand(2), "u64"), offset_of(d), d.line

    def execute(w: Wave) -> None:
        address = aligned(d, base(w) + offset(w))
        data = np.array([w.s[source : source + words]], np.uint32).view(np.uint8)
        try:
            w.group.memory.store(np.array([address], np.uint64), data)
        except OutOfBounds as error:
            raise fault(d, address, error) from None
        w.waits.add("scalar", line)

    return execute


for _name, _words in SIZES.items():
    add(f"s_load_{_name}", partial(scalar_load, _words, False))
    add(f"s_buffer_load_{_name}", partial(scalar_load, _words, True))
    if _words <= 4:
        add(f"s_store_{_name}", partial(scalar_store, _words))
