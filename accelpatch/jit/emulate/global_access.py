"""Global, flat and scratch loads and stores. Flat addresses of the apertures go to LDS and to private memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from accelpatch.jit.emulate.integers import PRIVATE_APERTURE, SHARED_APERTURE, read_integer
from accelpatch.jit.emulate.memory import OutOfBounds
from accelpatch.jit.emulate.operands import Operand
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.transfers import LOADS, STORES, Form, checked, get, out_of_bounds, put
from accelpatch.jit.emulate.values import register_reader
from accelpatch.jit.emulate.vector import row_of
from accelpatch.jit.emulate.wave import Array, Wave

Addresses = Callable[[Wave], Array]
APERTURES = ((SHARED_APERTURE, "lds"), (PRIVATE_APERTURE, "private"))


def addresses_of(d: Decoding, lanes: Operand, space: str) -> Addresses:
    """uint64[64]: a vector pair, or a scalar pair and a 32-bit vector offset, and the instruction's own offset.

    Of scratch: a vector register, a scalar one or both, as offsets in private memory. lanes: the vector operand, which
    comes first; the scalar one is the next to be taken.
    """
    for name in ("glc", "slc", "sc0", "sc1", "nt"):
        d.flag(name)
    offset = np.uint64(d.number("offset") & (1 << 64) - 1)
    if space == "scratch":
        return _scratch_addresses(d, lanes, d.number("offset"))
    base = None if space == "flat" else d.operand()
    row_of(d, lanes, 2 if base is None or base.text == "off" else 1)
    register = d.reading(lanes).register
    if base is None or base.text == "off":
        pair = register_reader(register, "u64")
        return lambda w: pair(w) + offset
    scalar, word = read_integer(d, base, "u64"), register_reader(register, "u32")
    return lambda w: word(w).astype(np.uint64) + (np.uint64(scalar(w)) + offset)


def _scratch_addresses(d: Decoding, lanes: Operand, offset: int) -> Addresses:
    base = d.operand()
    scalar = read_integer(d, base) if base.text != "off" else lambda w: 0
    if lanes.text == "off":
        return lambda w: np.full(64, PRIVATE_APERTURE + scalar(w) + offset, np.uint64)
    row = row_of(d, d.reading(lanes))
    return lambda w: w.u32[row].astype(np.uint64) + np.uint64(PRIVATE_APERTURE + scalar(w) + offset)


def by_space(at: Array, lanes: Array, generic: bool) -> list[tuple[str, Array, Array]]:
    """(space, addresses, lanes) of each memory that addresses are of; offsets where it is not global."""
    if not generic or not (at >= np.uint64(SHARED_APERTURE)).any():
        return [("global", at, lanes)]
    found, rest = [], np.ones(len(at), bool)
    for base, space in APERTURES:
        inside = (at >> np.uint64(32)) == np.uint64(base >> 32)
        found.append((space, (at[inside] & np.uint64(0xFFFFFFFF)).astype(np.int64), some_of(lanes, inside)))
        rest &= ~inside
    return [one for one in [*found, ("global", at[rest], some_of(lanes, rest))] if len(one[1])]


def some_of(lanes: Array, chosen: Array) -> Array:
    """bool[64] of those of the lanes that are chosen."""
    found = np.zeros(64, bool)
    found[lanes] = chosen
    return found


def load(form: Form, space: str, d: Decoding) -> Step:
    row = row_of(d, d.writing(d.operand(form.words)), form.words)
    addresses, check = addresses_of(d, d.operand(), space), checked(d, form.bytes)
    line, registers = d.line, tuple(d.writes)
    kind, generic = "flat" if space == "flat" else "vector", space != "global"

    def execute(w: Wave) -> None:
        if w.exec:
            every = addresses(w)[w.mask]
            check(w, every, w.mask, False)
            for where, at, lanes in by_space(every, w.mask, generic):
                if where != "global":
                    memory = w.private if where == "private" else w.group.lds
                    put(w, row, form, memory.load(w, line, at, form.bytes, lanes), lanes)
                    continue
                try:
                    put(w, row, form, w.group.memory.load(at, form.bytes), lanes)
                except OutOfBounds as error:
                    raise out_of_bounds(d, w, at, lanes, error) from None
        w.waits.add(kind, line, registers)

    return execute


def store(form: Form, space: str, d: Decoding) -> Step:
    lanes_operand, source = d.operand(), d.operand(form.words)
    row = row_of(d, d.reading(source), form.words)
    addresses, check, line = addresses_of(d, lanes_operand, space), checked(d, form.bytes), d.line
    kind, generic = "flat" if space == "flat" else "vector", space != "global"

    def execute(w: Wave) -> None:
        if w.exec:
            every = addresses(w)[w.mask]
            check(w, every, w.mask, False)
            for where, at, lanes in by_space(every, w.mask, generic):
                data = get(w, row, form, lanes)
                if where != "global":
                    memory = w.private if where == "private" else w.group.lds
                    memory.store(w, line, at, data, lanes)
                    continue
                try:
                    w.group.memory.store(at, data)
                except OutOfBounds as error:
                    raise out_of_bounds(d, w, at, lanes, error) from None
        w.waits.add(kind, line)

    return execute


for _space in ("global", "flat", "scratch"):
    _archs = "gfx942 gfx950" if _space == "scratch" else ""
    for _name, _form in LOADS.items():
        add(f"{_space}_load_{_name}", partial(load, _form, _space), _archs)
    for _name, _form in STORES.items():
        add(f"{_space}_store_{_name}", partial(store, _form, _space), _archs)
