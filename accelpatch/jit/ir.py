"""The intermediate representation: instructions on virtual registers, in basic blocks.

Everything that can hold a value has a number, one for each 32 bits: its unit. The first ones are those of HIDDEN;
each virtual register has a run of its own from ``Register.unit`` on. Sets of units are Python integers, a bit a unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from accelpatch.jit.location import Line
from accelpatch.jit.table import Form
from accelpatch.jit.types import Argument

#: registers with places of their own -> the first unit and how many it has
HIDDEN = {"scc": (0, 1), "vcc": (1, 2), "exec": (3, 2), "m0": (5, 1), "vcc_lo": (1, 1), "vcc_hi": (2, 1),
          "exec_lo": (3, 1), "exec_hi": (4, 1)}  # fmt: skip
FIRST_UNIT = 6


@dataclass(frozen=True, eq=False)
class Register:
    """A virtual register or array of them. file: s, v or a. fixed: the place where the hardware puts it, if it does."""

    file: str
    dwords: int
    unit: int
    line: Line
    label: str = ""
    fixed: int | None = None
    alignment: list[int] = field(default_factory=lambda: [1])  # grows with the widest use

    @property
    def name(self) -> str:
        return self.label or self.line.assigned or "a register"


@dataclass(frozen=True)
class Part:
    """Dwords ``first`` to ``first + dwords`` of a register, as an operand. sign: "-", "|" or "-|" of a float."""

    register: Register
    first: int
    dwords: int
    sign: str = ""

    @property
    def mask(self) -> int:
        return ((1 << self.dwords) - 1) << (self.register.unit + self.first)


#: A register, or text as it stands in assembly: a constant, "off", "vcc", "vmcnt(0)"
Operand = Part | str


@dataclass(frozen=True, eq=False)
class Region:
    """Code that runs with one set of lanes: the kernel, and below it each branch of a condition of vectors.

    manual: the kernel sets the lanes itself, so that nothing is known of which they are.
    """

    parent: Region | None = None
    manual: bool = False

    @property
    def path(self) -> tuple[Region, ...]:
        """From the kernel's own region down to this one."""
        return (*self.parent.path, self) if self.parent else (self,)


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction. mod: its modifiers as text. own: whether the jit added it for itself (an argument's load)."""

    form: Form
    operands: tuple[Operand, ...]
    mod: str
    line: Line
    region: Region
    own: bool = False
    reads: int = 0
    writes: int = 0

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def text(self) -> str:
        """It in the words of assembly, virtual registers by their names."""
        words = ", ".join(map(_shown, self.operands))
        return " ".join(filter(None, (self.name, words, self.mod)))


def _shown(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    register, last = operand.register, operand.first + operand.dwords - 1
    name = f"{register.name.replace(' ', '_')}.{register.unit}"
    inside = "" if operand.dwords == register.dwords else f"[{operand.first}:{last}]"
    return f"{operand.sign[:1]}%{register.file}.{name}{inside}"


@dataclass(eq=False)
class Block:
    """Instructions with one way in; next: the blocks that may follow. A block without a jump falls to the one below."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    next: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """A kernel that is being compiled."""

    name: str
    arch: str
    threads: int  # the most of a workgroup
    arguments: tuple[Argument, ...]
    line: Line
    blocks: list[Block] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    lds: int = 0
    waits: str = "checked"  # whose the waits are: "checked", the kernel's, or "auto", the jit's
    notes: list[str] = field(default_factory=list)  # what passes left as it was, and why
    next_unit: int = FIRST_UNIT

    def new_register(self, file: str, dwords: int, line: Line, label: str = "", fixed: int | None = None) -> Register:
        made = Register(file, dwords, self.next_unit, line, label, fixed)
        self.next_unit += dwords
        self.registers.append(made)
        return made

    def note(self, name: str, reason: str, line: Line) -> None:
        """A pass says what it leaves as it was, and why."""
        text = f"{line}: {name}: {reason}"
        self.notes += [text] if text not in self.notes else []

    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions

    def reached(self) -> list[Block]:
        """The blocks that something leads to, in their order."""
        found, waiting = set[Block](), [self.blocks[0]]
        while waiting:
            block = waiting.pop()
            if block not in found:
                found.add(block)
                waiting += block.next
        return [block for block in self.blocks if block in found]

    def __str__(self) -> str:
        lines = []
        for block in self.blocks:
            after = ", ".join(one.label for one in block.next)
            lines.append(f"{block.label}:" + (f"  ; then {after}" if after else ""))
            lines += [f"    {one.text}  // {one.line}" for one in block.instructions]
        return "\n".join(lines)
