"""The intermediate representation: instructions on virtual registers, in basic blocks.

As in LLVM, a register unit (``regunit``) is the smallest part of a register that liveness is tracked for: 32 bits, with
a number of its own. The first numbers belong to SPECIAL; each virtual register has consecutive ones from
``Register.first_regunit`` on. A set of register units is a Python integer, with a bit for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from accelpatch.jit.location import Line
from accelpatch.jit.table import Form
from accelpatch.jit.types import Argument

#: registers that are not allocated -> the first register unit, and how many there are
SPECIAL = {"scc": (0, 1), "vcc": (1, 2), "exec": (3, 2), "m0": (5, 1), "vcc_lo": (1, 1), "vcc_hi": (2, 1),
          "exec_lo": (3, 1), "exec_hi": (4, 1)}  # fmt: skip
FIRST_REGUNIT = 6


def special_regunits(name: str) -> int:
    """The register units of a name in SPECIAL."""
    first, count = SPECIAL[name]
    return ((1 << count) - 1) << first


@dataclass(frozen=True, eq=False)
class Register:
    """A virtual register, or an array of them. file: s, v or a. fixed: the number of its first physical register, where
    the hardware determines that."""

    file: str
    dwords: int
    first_regunit: int
    line: Line
    label: str = ""
    fixed: int | None = None
    alignment: list[int] = field(default_factory=lambda: [1])  # grows with the widest use

    @property
    def name(self) -> str:
        return self.label or self.line.assigned or "a register"


@dataclass(frozen=True)
class Part:
    """Dwords ``first`` to ``first + dwords`` of a register, as an operand. sign: the modifier of a float operand, "-"
    for its negation, "|" for its absolute value, or "-|" for both."""

    register: Register
    first: int
    dwords: int
    sign: str = ""

    @property
    def mask(self) -> int:
        """Its register units."""
        return ((1 << self.dwords) - 1) << (self.register.first_regunit + self.first)


#: A register, or text as it stands in assembly: a constant, "off", "vcc", "vmcnt(0)"
Operand = Part | str


@dataclass(frozen=True, eq=False)
class Region:
    """Code that runs with one exec mask: the whole kernel, and nested in it each branch of a vector condition.

    manual: the kernel itself has written exec, so that nothing is known about the mask.
    """

    parent: Region | None = None
    manual: bool = False

    @property
    def path(self) -> tuple[Region, ...]:
        """From the kernel's own region down to this one."""
        return (*self.parent.path, self) if self.parent else (self,)


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction. mod: its modifiers as text. in_prologue: whether it belongs to the jit's prologue, such as the
    load of an argument. reads, writes: register units, implicit operands included."""

    form: Form
    operands: tuple[Operand, ...]
    mod: str
    line: Line
    region: Region
    in_prologue: bool = False
    reads: int = 0
    writes: int = 0

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def text(self) -> str:
        """The instruction as assembly shows it, but with names of virtual registers."""
        words = ", ".join(map(_shown, self.operands))
        return " ".join(filter(None, (self.name, words, self.mod)))


def _shown(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    register, last = operand.register, operand.first + operand.dwords - 1
    name = f"{register.name.replace(' ', '_')}.{register.first_regunit}"
    inside = "" if operand.dwords == register.dwords else f"[{operand.first}:{last}]"
    return f"{operand.sign[:1]}%{register.file}.{name}{inside}"


@dataclass(eq=False)
class Block:
    """A basic block. Control may leave it at its end, or by conditional branches before, for each of its successors; it
    falls through to the block below unless it ends in an unconditional jump."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """A kernel that is being compiled."""

    name: str
    arch: str
    threads: int  # the largest workgroup that it may be launched with
    arguments: tuple[Argument, ...]
    line: Line
    blocks: list[Block] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    lds: int = 0
    waits: str = "checked"  # who writes the waits: the kernel ("checked") or the jit ("auto")
    notes: list[str] = field(default_factory=list)  # what passes left unchanged, and why
    next_regunit: int = FIRST_REGUNIT

    def new_register(self, file: str, dwords: int, line: Line, label: str = "", fixed: int | None = None) -> Register:
        made = Register(file, dwords, self.next_regunit, line, label, fixed)
        self.next_regunit += dwords
        self.registers.append(made)
        return made

    def note(self, name: str, reason: str, line: Line) -> None:
        """Record what a pass leaves unchanged, and why."""
        text = f"{line}: {name}: {reason}"
        self.notes += [text] if text not in self.notes else []

    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions

    def reached(self) -> list[Block]:
        """The reachable blocks, in program order."""
        found, waiting = set[Block](), [self.blocks[0]]
        while waiting:
            block = waiting.pop()
            if block not in found:
                found.add(block)
                waiting += block.successors
        return [block for block in self.blocks if block in found]

    def __str__(self) -> str:
        lines = []
        for block in self.blocks:
            after = ", ".join(one.label for one in block.successors)
            lines.append(f"{block.label}:" + (f"  ; then {after}" if after else ""))
            lines += [f"    {one.text}  // {one.line}" for one in block.instructions]
        return "\n".join(lines)
