"""The instructions of gfx90a, gfx942 and gfx950: names, operands, sizes, archs.

``instructions.txt`` has one instruction per line, made by scripts/jit_table.py: mnemonic, execution unit, archs (by the
keys of ARCHS), flags, ``reads>writes`` (implicit operands), then a slot for each explicit operand, in the order of
assembly. A slot is ``USE KINDS DWORDS`` with no space between. USE: ``=`` written, ``+`` read and written, nothing:
read. KINDS, what the slot accepts: v, a and s registers, i an inline constant, l a 32-bit literal, n another number or
text, o the word "off", b a label. DWORDS: its size in 32-bit registers, or two sizes that it accepts (``1/2``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

ARCHS = MappingProxyType({"a": "gfx90a", "4": "gfx942", "5": "gfx950"})


@dataclass(frozen=True)
class Slot:
    """An operand slot of an instruction: what it accepts."""

    use: str  # "" read, "=" written, "+" both
    kinds: str
    dwords: tuple[int, ...]

    @property
    def reads(self) -> bool:
        return self.use != "="

    @property
    def writes(self) -> bool:
        return self.use != ""

    def __str__(self) -> str:
        return f"{self.use}{self.kinds}{'/'.join(map(str, self.dwords))}"


@dataclass(frozen=True)
class Form:
    """A form of an instruction: a mnemonic with its operand slots. unit: the execution unit, one of salu, control,
    smem, valu, trans, matrix, ds, flat, global, scratch, buffer. reads, writes: implicit operands. flags: "short" if
    there is a 32-bit encoding, "load", "store" and "lds"."""

    name: str
    unit: str
    archs: tuple[str, ...]
    flags: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    operands: tuple[Slot, ...]  # a slot for each

    def renamed(self, name: str) -> Form:
        return replace(self, name=name)

    def on(self, archs: tuple[str, ...]) -> Form:
        return replace(self, archs=archs)

    def line(self) -> str:
        """Its line of the table."""
        archs = "".join(key for key, arch in ARCHS.items() if arch in self.archs)
        hidden = f"{','.join(self.reads)}>{','.join(self.writes)}"
        return " ".join([self.name, self.unit, archs, ",".join(self.flags) or "-", hidden, *map(str, self.operands)])


def parse(line: str) -> Form:
    """An instruction from its line of the table."""
    name, unit, archs, flags, hidden, *operands = line.split()
    reads, _, writes = hidden.partition(">")
    return Form(
        name, unit, tuple(ARCHS[key] for key in archs), () if flags == "-" else tuple(flags.split(",")),
        tuple(filter(None, reads.split(","))), tuple(filter(None, writes.split(","))), tuple(map(_operand, operands)),
    )  # fmt: skip


@functools.cache
def _operand(text: str) -> Slot:
    found = re.fullmatch(r"([=+]?)([a-z]+)([\d/]+)", text)
    assert found is not None, text
    return Slot(found[1], found[2], tuple(map(int, found[3].split("/"))))


@functools.cache
def lines() -> Mapping[str, tuple[str, ...]]:
    """Mnemonic -> the lines of its forms, which are parsed only when they are looked up."""
    found: dict[str, tuple[str, ...]] = {}
    for line in Path(__file__).with_name("instructions.txt").read_text().splitlines():
        if not line.startswith("#"):
            name = line.partition(" ")[0]
            found[name] = (*found.get(name, ()), line)
    return found


@functools.cache
def lookup(name: str) -> tuple[Form, ...]:
    """The forms of a mnemonic on any arch; none where there is no such instruction."""
    return tuple(parse(line) for line in lines().get(name, ()))
