"""Mnemonic -> the builder that makes an executable instruction from operands. Each family's file registers its own."""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from accelpatch.jit.emulate.assembly import Line, Program, parse, parse_line
from accelpatch.jit.emulate.operands import Operand
from accelpatch.jit.emulate.wait_states import Traits, traits_of
from accelpatch.jit.emulate.wave import Wave

Step = Callable[[Wave], object]


@dataclass(frozen=True, eq=False)
class Instruction:
    """execute: its effect. reads, writes: register numbers. whole: reads all lanes whatever exec says.

    waits_for: registers that no outstanding load may still write: those that are read, and those of which single lanes
    are accessed.
    """

    line: Line
    execute: Step
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    waits_for: tuple[int, ...]
    whole: bool
    traits: Traits


class Decoding:
    """The decoding of one instruction: families take its operands in order and record the registers that they
    access."""

    def __init__(self, line: Line, program: Program, arch: str) -> None:
        self.line, self.program, self.arch = line, program, arch
        self.mnemonic, self.encoding, self.modifiers = line.mnemonic, line.encoding, line.modifiers
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.pending_reads: list[int] = []
        self.whole = False
        self.dpp = False  # takes a source from other lanes
        self._known: set[str] = set()
        self._taken = 0

    def operand(self, count: int | None = None) -> Operand:
        """The next operand. count: how many 32-bit registers it must have, if it is a register."""
        if self._taken >= len(self.line.operands):
            raise self.line.fault(f"it has {len(self.line.operands)} operands, and needs more")
        operand = self.line.operands[self._taken]
        self._taken += 1
        if count is not None and operand.kind == "register" and operand.count != count:
            raise self.line.fault(f"{operand.text} has {operand.count} registers, and must have {count}")
        return operand

    @property
    def left(self) -> int:
        return len(self.line.operands) - self._taken

    def peek(self) -> Operand:
        return self.line.operands[self._taken]

    def modifier(self, name: str) -> str | None:
        self._known.add(name)
        return self.modifiers.get(name)

    def number(self, name: str, otherwise: int = 0) -> int:
        value = self.modifier(name)
        return otherwise if value is None else int(value, 0)

    def flag(self, name: str) -> bool:
        return self.modifier(name) is not None

    def bits(self, name: str, otherwise: list[int]) -> list[int]:
        """A list of a modifier, such as op_sel:[0,1], made as long as `otherwise`."""
        value = self.modifier(name)
        found = [] if value is None else [int(one, 0) for one in value.strip("[]").split(",")]
        return found + otherwise[len(found) :]

    def reading(self, operand: Operand, extra: int = 0) -> Operand:
        if operand.kind == "register":
            self.reads += range(operand.register, operand.register + operand.count + extra)
        return operand

    def writing(self, operand: Operand) -> Operand:
        if operand.kind != "register":
            raise self.line.fault(f"{operand.text} is no register that it could write")
        self.writes += range(operand.register, operand.register + operand.count)
        return operand

    def done(self, execute: Step) -> Instruction:
        if self.left:
            raise self.line.fault(f"it takes {self._taken} operands, and has {len(self.line.operands)}")
        if unknown := self.modifiers.keys() - self._known:
            raise self.line.fault(f"the emulator does not know its modifier {', '.join(sorted(unknown))}")
        reads = tuple(self.reads)
        writes, waits_for = tuple(self.writes), (*reads, *self.pending_reads)
        traits = traits_of(self.line, waits_for, writes, self.arch, self.dpp)
        return Instruction(self.line, execute, reads, writes, waits_for, self.whole, traits)


Builder = Callable[[Decoding], Step]
BUILDERS: dict[str, Builder] = {}
ONLY_ON: dict[str, frozenset[str]] = {}


def add(name: str, builder: Builder, archs: str = "") -> None:
    """Register an instruction. archs: those that have it, separated by blanks; empty for all."""
    if name in BUILDERS:
        raise ValueError(f"{name} is registered twice")
    BUILDERS[name] = builder
    if archs:
        ONLY_ON[name] = frozenset(archs.split())


def instruction(names: str, archs: str = "") -> Callable[[Builder], Builder]:
    """Register a builder for one or more mnemonics, separated by blanks."""

    def register(builder: Builder) -> Builder:
        for name in names.split():
            add(name, builder, archs)
        return builder

    return register


class Code:
    """A program for an arch. An instruction is decoded when it is first reached, and then kept."""

    def __init__(self, program: Program, arch: str) -> None:
        self.program, self.arch = program, arch
        self.constants = {
            name: (ctypes.c_uint8 * len(data)).from_buffer_copy(data) for name, data in program.data.items()
        }
        program.addresses = {name: ctypes.addressof(memory) for name, memory in self.constants.items()}
        self.ready: list[Instruction | None] = [None] * (len(program.lines) + 1)

    def decode(self, at: int) -> Instruction:
        """Decode number `at` and keep it. Raises EmulationError where there is none."""
        if at >= len(self.program.lines):
            last = self.program.lines[-1]
            raise parse_line(last).fault("a wave runs past this last instruction: s_endpgm is missing")
        made = decode(parse_line(self.program.lines[at]), self.program, self.arch)
        self.ready[at] = made
        return made


@lru_cache(maxsize=32)
def code_of(text: str, arch: str) -> Code:
    """The code of an assembly file."""
    return Code(parse(text), arch)


def decode(line: Line, program: Program, arch: str) -> Instruction:
    """Make an instruction executable. Raises EmulationError for one that the emulator, or the arch, does not have."""
    builder = BUILDERS.get(line.mnemonic)
    if builder is None:
        near = difflib.get_close_matches(line.mnemonic, BUILDERS, 3)
        hint = f" (it knows {', '.join(near)})" if near else ""
        raise line.fault(f"the emulator does not know the instruction {line.mnemonic}{hint}")
    if arch not in ONLY_ON.get(line.mnemonic, (arch,)):
        raise line.fault(f"{arch} does not have it; {', '.join(sorted(ONLY_ON[line.mnemonic]))} do")
    decoding = Decoding(line, program, arch)
    return decoding.done(builder(decoding))
