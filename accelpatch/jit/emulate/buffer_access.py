"""Buffer loads, stores and atomics: through a descriptor in four scalar registers, with its own check of the range.

What lies behind the descriptor's end reads as zero, and is not stored: kernels count on it. What lies inside must still
be memory that the kernel was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from accelpatch.jit.emulate.atomic_operations import OPERATIONS, Operation
from accelpatch.jit.emulate.atomics import data_of, form_of, on_memory
from accelpatch.jit.emulate.integers import read_integer
from accelpatch.jit.emulate.memory import OutOfBounds
from accelpatch.jit.emulate.operands import M0, Operand
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.transfers import LOADS, STORES, Form, checked, get, out_of_bounds, put
from accelpatch.jit.emulate.vector import row_of
from accelpatch.jit.emulate.wave import Array, Wave


class Place:
    """The address operands of a buffer instruction: vector offset or index (or both), descriptor, scalar offset."""

    def __init__(self, d: Decoding, vector: Operand) -> None:
        self.line = d.line
        self.descriptor = d.reading(d.operand(4)).register
        self.scalar = read_integer(d, d.operand())
        self.offset = d.number("offset")
        self.offen, self.idxen = d.flag("offen"), d.flag("idxen")
        for name in ("glc", "slc", "sc0", "sc1", "nt"):
            d.flag(name)
        self.row = -1
        if self.offen or self.idxen:
            self.row = row_of(d, d.reading(vector), self.offen + self.idxen)
        elif vector.text != "off":
            raise d.line.fault(f"{vector.text} is used by neither offen nor idxen: write off")

    def addresses(self, w: Wave, lanes: Array) -> tuple[Array, Array]:
        """uint64 addresses of the lanes that are set, and the bytes that the buffer has left at each."""
        low, high, records, flags = w.s[self.descriptor : self.descriptor + 4]
        stride, swizzled = high >> 16 & 0x3FFF, high >> 31
        if swizzled or flags >> 23 & 1:
            raise self.line.fault("the emulator knows no swizzled buffers, and none that add the thread's number")
        base, scalar = low | (high & 0xFFFF) << 32, self.scalar(w)
        offset = np.full(int(lanes.sum()), self.offset, np.int64)
        if self.idxen:
            offset += w.u32[self.row, lanes].astype(np.int64) * stride
        if self.offen:
            offset += w.u32[self.row + self.idxen, lanes].astype(np.int64)
        left = records * (stride or 1) - scalar - offset if self.idxen and stride else records - scalar - offset
        return (offset + scalar).astype(np.uint64) + np.uint64(base), left


@dataclass(frozen=True)
class Within:
    """Which of the lanes are inside the buffer with all of a part of an access."""

    lanes: Array
    addresses: Array
    chosen: Array


def within(addresses: Array, left: Array, lanes: Array, begin: int, size: int) -> Within:
    chosen = left >= begin + size
    inside = np.zeros(64, bool)
    inside[lanes] = chosen
    return Within(inside, addresses[chosen] + np.uint64(begin), chosen)


def load(form: Form, d: Decoding) -> Step:
    to_lds = d.flag("lds")
    into = -1 if to_lds else row_of(d, d.writing(d.operand(form.words)), form.words)
    place, check = Place(d, d.operand()), checked(d, form.bytes)
    line, registers = d.line, tuple(d.writes)
    part = min(form.bytes, 4)
    if to_lds:
        d.reads.append(M0)

    def execute(w: Wave) -> None:
        if w.exec:
            addresses, left = place.addresses(w, w.mask)
            check(w, addresses, w.mask, False)
            data = np.zeros((len(addresses), form.bytes), np.uint8)
            for begin in range(0, form.bytes, part):
                inside = within(addresses, left, w.mask, begin, part)
                try:
                    loaded = w.group.memory.load(inside.addresses, part)
                except OutOfBounds as error:
                    raise out_of_bounds(d, w, inside.addresses, inside.lanes, error) from None
                data[inside.chosen, begin : begin + part] = loaded
            if to_lds:
                at = (w.s[M0] & 0xFFFF) + place.offset + np.flatnonzero(w.mask) * form.bytes
                w.group.lds.store(w, line, at, data, w.mask)
            else:
                put(w, into, form, data, w.mask)
        w.waits.add("vector", line, registers)

    return execute


def store(form: Form, d: Decoding) -> Step:
    row = row_of(d, d.reading(d.operand(form.words)), form.words)
    place, check, line = Place(d, d.operand()), checked(d, form.bytes), d.line
    part = min(form.bytes, 4)

    def execute(w: Wave) -> None:
        if w.exec:
            addresses, left = place.addresses(w, w.mask)
            check(w, addresses, w.mask, False)
            data = get(w, row, form, w.mask)
            for begin in range(0, form.bytes, part):
                inside = within(addresses, left, w.mask, begin, part)
                try:
                    w.group.memory.store(inside.addresses, data[inside.chosen, begin : begin + part])
                except OutOfBounds as error:
                    raise out_of_bounds(d, w, inside.addresses, inside.lanes, error) from None
        w.waits.add("vector", line)

    return execute


def atomic(operation: Operation, d: Decoding) -> Step:
    form = form_of(operation)
    returns = d.flag("sc0") if d.arch != "gfx90a" else d.flag("glc")
    count = form.words * (1 + operation.compares)
    source = d.operand(count)
    row = row_of(d, d.reading(source), count)
    place, check, line = Place(d, d.operand()), checked(d, form.bytes), d.line
    if returns:
        d.writes += range(source.register, source.register + form.words)
    registers = tuple(d.writes)

    def execute(w: Wave) -> None:
        if w.exec:
            addresses, left = place.addresses(w, w.mask)
            check(w, addresses, w.mask, True)
            inside = within(addresses, left, w.mask, 0, form.bytes)
            data = data_of(w, row, operation, inside.lanes)
            old = on_memory(w, d, operation, inside.addresses, data, inside.lanes)
            if returns:
                put(w, row, form, old, inside.lanes)
        w.waits.add("vector", line, registers)

    return execute


for _name, _form in LOADS.items():
    add(f"buffer_load_{_name}", partial(load, _form))
for _name, _form in STORES.items():
    add(f"buffer_store_{_name}", partial(store, _form))
for _name, _operation in OPERATIONS.items():
    if not _name.startswith(("rsub", "min_f32", "max_f32")):
        add(f"buffer_atomic_{_name}", partial(atomic, _operation), "gfx950" if _name == "pk_add_bf16" else "")
