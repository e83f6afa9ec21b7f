"""How scalar instructions are registered: a signature of types, and a table of mnemonics and functions of integers.

``scalar("u32: u32 u32", {"s_and_b32": lambda a, b: a & b}, scc=nonzero)``. Types are u32, i32, u64 and i64. scc: of the
result (already cut to its bits) what the flag becomes; "pair": the function returns result and flag; None: it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelpatch.jit.emulate.integers import WORDS, IntegerReader, IntegerWriter, read_integer, write_integer
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.wave import Wave

Function = Callable[..., Any]


def nonzero(result: int) -> int:
    return int(result != 0)


def scalar(signature: str, table: Mapping[str, Function], scc: Callable[[int], int] | str | None = None) -> None:
    result, _, sources = signature.partition(":")
    for name, function in table.items():
        add(name, partial(build, function, result.strip(), sources.split(), scc))


def build(
    function: Function,
    result: str,
    sources: list[str],
    scc: Callable[[int], int] | str | None,
    d: Decoding,
) -> Step:
    words = WORDS[result]
    store = write_integer(d, d.operand(), words)
    readers = [read_integer(d, d.operand(), kind) for kind in sources]
    cut = (1 << 32 * words) - 1
    if scc is None:
        return lambda w: store(w, function(*[one(w) for one in readers]))
    if isinstance(scc, str):
        return _with_pair(function, readers, store)

    def execute(w: Wave) -> None:
        value = function(*[one(w) for one in readers]) & cut
        store(w, value)
        w.scc = scc(value)

    return execute


def _with_pair(function: Function, readers: list[IntegerReader], store: IntegerWriter) -> Step:
    def execute(w: Wave) -> None:
        value, flag = function(*[one(w) for one in readers])
        store(w, value)
        w.scc = int(flag)

    return execute
