"""How vector instructions are registered: a signature of types, and a table of mnemonics and numpy functions.

``vector("u32: u32 u32", {"v_add_u32": lambda a, b: a + b})``. Types are those of values.py; "mask" is a lane mask in a
scalar pair. "f32: f32 f32 +" hands the old destination over as the last source. With two results, "u32 mask: ...", the
function returns a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelpatch.jit.emulate.operands import VGPR, Operand
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import Reader, Writer, read, read_mask, register_reader, write, write_mask
from accelpatch.jit.emulate.wave import Wave

Function = Callable[..., Any]


def vector(signature: str, table: Mapping[str, Function], archs: str = "", preserve: bool = False) -> None:
    """Register a table. preserve: 16-bit results leave the upper half as it is."""
    results, _, sources = signature.partition(":")
    for name, function in table.items():
        if len(results.split()) == 1:
            builder = partial(build, function, results, sources.split(), preserve)
        else:
            builder = partial(build_two, function, results.split(), sources.split())
        add(name, builder, archs)


def build(function: Function, result: str, sources: list[str], preserve: bool, d: Decoding) -> Step:
    destination = d.operand()
    readers = read_sources(d, sources, destination, result)
    store = write(d, destination, result, preserve, len(sources))
    return applied(function, readers, store)


def build_two(function: Function, results: list[str], sources: list[str], d: Decoding) -> Step:
    destination, second = d.operand(), d.operand()
    readers = read_sources(d, sources, destination, results[0])
    store = write(d, destination, results[0])
    store_mask = write_mask(d, second)

    def execute(w: Wave) -> None:
        value, mask = function(*[one(w) for one in readers])
        store(w, value)
        store_mask(w, mask)

    return execute


def read_sources(d: Decoding, sources: list[str], destination: Operand, result: str) -> list[Reader]:
    readers = []
    for number, kind in enumerate(sources):
        if kind == "mask":
            readers.append(read_mask(d, d.operand()))
        elif kind == "+":
            readers.append(register_reader(d.reading(destination).register, result))
        else:
            readers.append(read(d, d.operand(), kind, number))
    return readers


def applied(function: Function, readers: list[Reader], store: Writer) -> Step:
    """Read, apply, store; by number of sources, since a star costs time."""
    if len(readers) == 1:
        [a] = readers
        return lambda w: store(w, function(a(w)))
    if len(readers) == 2:
        a, b = readers
        return lambda w: store(w, function(a(w), b(w)))
    if len(readers) == 3:
        a, b, c = readers
        return lambda w: store(w, function(a(w), b(w), c(w)))
    return lambda w: store(w, function(*[one(w) for one in readers]))


def row_of(d: Decoding, operand: Operand, words: int = 1) -> int:
    """The row in wave.u32 of a vector or accumulation register (the first of `words`)."""
    if not operand.vector or operand.count != words:
        raise d.line.fault(f"{operand.text} must be {words} vector register{'s' * (words > 1)}")
    return operand.register - VGPR
