"""Which registers hold a value that is still read, at every place of a program.

A vector register that is written by some lanes alone keeps the values of the others. So a write inside a region is a
whole one only if the register is used nowhere outside of it; else what was there before lives on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accelpatch.jit.ir import HIDDEN, Block, Instruction, Part, Program, Region, Register
from accelpatch.jit.location import fail

_ALWAYS = sum(((1 << many) - 1) << first for first, many in (HIDDEN[name] for name in ("scc", "vcc", "exec", "m0")))


def bits(mask: int) -> Iterator[int]:
    """The units of a set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass
class Flow:
    """live_out: the units that are read after the end of each block. defined_in: those that may have a value at its
    start. kept: of each instruction, the units that it writes in part only."""

    live_out: dict[Block, int]
    defined_in: dict[Block, int]
    kept: dict[Instruction, int]

    def uses(self, one: Instruction) -> int:
        return one.reads | self.kept[one]

    def kills(self, one: Instruction) -> int:
        return one.writes & ~self.kept[one]


def homes(program: Program) -> dict[Register, Region]:
    """Register -> the innermost region that holds all of its uses."""
    paths: dict[Register, tuple[Region, ...]] = {}
    for one in program.instructions():
        for operand in one.operands:
            if isinstance(operand, Part):
                path = one.region.path
                before = paths.get(operand.register, path)
                common = [a for a, b in zip(before, path, strict=False) if a is b]
                paths[operand.register] = tuple(common)
    return {register: path[-1] for register, path in paths.items()}


def flow(program: Program) -> Flow:
    home = homes(program)
    kept = {}
    for one in program.instructions():
        partly = 0
        for operand in one.operands:
            if isinstance(operand, Part) and operand.register.file != "s":
                whole = home[operand.register] is one.region and not one.region.manual
                partly |= 0 if whole else operand.mask & one.writes
        kept[one] = partly
    fixed = sum(((1 << one.dwords) - 1) << one.unit for one in program.registers if one.fixed is not None)
    found = Flow({}, {}, kept)
    _backward(program, found)
    _forward(program, found, fixed | _ALWAYS)
    return found


def _backward(program: Program, found: Flow) -> None:
    uses, kills = {}, {}
    for block in program.blocks:
        use = kill = 0
        for one in reversed(block.instructions):
            use = (use & ~found.kills(one)) | found.uses(one)
            kill |= found.kills(one)
        uses[block], kills[block] = use, kill
        found.live_out[block] = 0
    live_in, changed = dict.fromkeys(program.blocks, 0), True
    while changed:
        changed = False
        for block in reversed(program.blocks):
            out = 0
            for after in block.next:
                out |= live_in[after]
            now = uses[block] | (out & ~kills[block])
            found.live_out[block] = out
            if now != live_in[block]:
                live_in[block], changed = now, True


def _forward(program: Program, found: Flow, start: int) -> None:
    writes = {}
    for block in program.blocks:
        writes[block] = 0
        for one in block.instructions:
            writes[block] |= one.writes
    found.defined_in.update(dict.fromkeys(program.blocks, 0))
    found.defined_in[program.blocks[0]] = start
    changed = True
    while changed:
        changed = False
        for block in program.blocks:
            out = found.defined_in[block] | writes[block]
            for after in block.next:
                if out & ~found.defined_in[after]:
                    found.defined_in[after] |= out
                    changed = True


def check_written(program: Program, found: Flow) -> None:
    """Raises CompileError where a register is read that nothing can have written."""
    for block in program.reached():
        written = found.defined_in[block]
        for one in block.instructions:
            for operand, slot in zip(one.operands, one.form.operands, strict=True):
                if isinstance(operand, Part) and slot.use == "" and operand.mask & ~written:
                    name, line = operand.register.name, operand.register.line
                    fail(f"{one.name} reads {name} of {line} before anything is written there", one.line)
            written |= one.writes
