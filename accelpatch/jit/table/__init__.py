"""The instructions of gfx90a, gfx942 and gfx950: names, operands, sizes, archs.

``instructions.txt`` holds one a line, made by scripts/jit_table.py: mnemonic, unit, archs (by the keys of ARCHS),
flags, ``reads>writes`` (registers that it uses without naming them), then its operands in the order of assembly. An
operand is ``USE KINDS DWORDS`` with no space between: USE ``=`` written, ``+`` read and written, nothing read; KINDS
which of v, a and s registers, i inline constant, l literal of 32 bits, n a number or text of its own, o the word "off",
b a label may stand there; DWORDS its size in 32-bit registers, two where either will do (``1/2``).
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
class Operand:
    """What may stand at one place of an instruction."""

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
    """An instruction's form. unit: salu, control, smem, valu, trans, matrix, ds, flat, global, scratch, buffer."""

    name: str
    unit: str
    archs: tuple[str, ...]
    flags: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    operands: tuple[Operand, ...]

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
def _operand(text: str) -> Operand:
    found = re.fullmatch(r"([=+]?)([a-z]+)([\d/]+)", text)
    assert found is not None, text
    return Operand(found[1], found[2], tuple(map(int, found[3].split("/"))))


@functools.cache
def lines() -> Mapping[str, tuple[str, ...]]:
    """Mnemonic -> the lines of its forms; few of them are ever parsed."""
    found: dict[str, tuple[str, ...]] = {}
    for line in Path(__file__).with_name("instructions.txt").read_text().splitlines():
        if not line.startswith("#"):
            name = line.partition(" ")[0]
            found[name] = (*found.get(name, ()), line)
    return found


@functools.cache
def lookup(name: str) -> tuple[Form, ...]:
    """The forms of a mnemonic, of any arch; none where there is no such instruction."""
    return tuple(parse(line) for line in lines().get(name, ()))
