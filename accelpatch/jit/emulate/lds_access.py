"""LDS loads and stores (ds_read, ds_write), single and in pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.transfers import Form, checked, get, put
from accelpatch.jit.emulate.vector import row_of
from accelpatch.jit.emulate.wave import Array, Wave

READS = {
    "u8": Form(1), "i8": Form(1, signed=True), "u16": Form(2), "i16": Form(2, signed=True),
    "u8_d16": Form(1, d16="low"), "u8_d16_hi": Form(1, d16="high"),
    "i8_d16": Form(1, signed=True, d16="low"), "i8_d16_hi": Form(1, signed=True, d16="high"),
    "u16_d16": Form(2, d16="low"), "u16_d16_hi": Form(2, d16="high"),
    "b32": Form(4), "b64": Form(8, 2), "b96": Form(12, 3), "b128": Form(16, 4),
}  # fmt: skip
WRITES = {
    "b8": Form(1), "b16": Form(2), "b8_d16_hi": Form(1, d16="high"), "b16_d16_hi": Form(2, d16="high"),
    "b32": Form(4), "b64": Form(8, 2), "b96": Form(12, 3), "b128": Form(16, 4),
}  # fmt: skip


def offsets(d: Decoding, count: int, scale: int) -> list[int]:
    """Of a single access the byte offset; of a pair both, in units of `scale` bytes."""
    if count == 1:
        return [d.number("offset")]
    return [d.number("offset0") * scale, d.number("offset1") * scale]


def addresses(w: Wave, row: int) -> Array:
    return w.u32[row, w.mask].astype(np.int64)


def all_of(laters: list[Callable[[], None] | None]) -> None:
    for later in laters:
        if later:
            later()


def read(form: Form, count: int, scale: int, d: Decoding) -> Step:
    into = row_of(d, d.writing(d.operand(form.words * count)), form.words * count)
    row = row_of(d, d.reading(d.operand(1)))
    by, check = offsets(d, count, scale), checked(d, form.bytes)
    line, registers = d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        later = None
        if w.exec:
            base = addresses(w, row)
            for number, offset in enumerate(by):
                at = base + offset
                check(w, at.astype(np.uint64), w.mask, False)
                put(w, into + number * form.words, form, w.group.lds.load(w, line, at, form.bytes, w.mask), w.mask)
            later = w.group.lds.later(w, line, base + by[0], form.bytes, False)
        w.waits.add("lds", line, registers, later)

    return execute


def write(form: Form, count: int, scale: int, d: Decoding) -> Step:
    row = row_of(d, d.reading(d.operand(1)))
    rows = [row_of(d, d.reading(d.operand(form.words)), form.words) for _ in range(count)]
    by, check, line = offsets(d, count, scale), checked(d, form.bytes), d.line

    def execute(w: Wave) -> None:
        if not w.exec:
            w.waits.add("lds", line)
            return
        base = addresses(w, row)
        laters = []
        for source, offset in zip(rows, by, strict=True):
            at = base + offset
            check(w, at.astype(np.uint64), w.mask, False)
            w.group.lds.store(w, line, at, get(w, source, form, w.mask), w.mask)
            laters.append(w.group.lds.later(w, line, at, form.bytes, True))
        w.waits.add("lds", line, (), lambda: all_of(laters))

    return execute


for _name, _form in READS.items():
    add(f"ds_read_{_name}", partial(read, _form, 1, 1))
for _name, _form in WRITES.items():
    add(f"ds_write_{_name}", partial(write, _form, 1, 1))
for _name in ("b32", "b64"):
    _form = READS[_name]
    add(f"ds_read2_{_name}", partial(read, _form, 2, _form.bytes))
    add(f"ds_read2st64_{_name}", partial(read, _form, 2, 64 * _form.bytes))
    add(f"ds_write2_{_name}", partial(write, _form, 2, _form.bytes))
    add(f"ds_write2st64_{_name}", partial(write, _form, 2, 64 * _form.bytes))
