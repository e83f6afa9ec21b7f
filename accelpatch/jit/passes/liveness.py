"""Liveness: which registers hold a value that is read later, at every point of a program.

A write of a vector register under an exec mask leaves the other lanes as they are. So a write in a region kills the old
value only if the register is used nowhere outside of this region; otherwise it is a partial write, and the old value
stays live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accelpatch.jit.ir import Block, Instruction, Part, Program, Region, Register, special_regunits
from accelpatch.jit.location import fail

_ALWAYS = sum(map(special_regunits, ("scc", "vcc", "exec", "m0")))  # are defined from the start


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set: the register units of a set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass
class Dataflow:
    """Sets of register units. live_out: those that are read after the end of a block. defined_in: those that may have
    been written before its start. partial: those that an instruction writes in some lanes only."""

    live_out: dict[Block, int]
    defined_in: dict[Block, int]
    partial: dict[Instruction, int]

    def uses(self, one: Instruction) -> int:
        return one.reads | self.partial[one]

    def kills(self, one: Instruction) -> int:
        return one.writes & ~self.partial[one]


def homes(program: Program) -> dict[Register, Region]:
    """Register -> the innermost region that contains all instructions with this register."""
    paths: dict[Register, tuple[Region, ...]] = {}
    for one in program.instructions():
        for operand in one.operands:
            if isinstance(operand, Part):
                path = one.region.path
                before = paths.get(operand.register, path)
                common = [a for a, b in zip(before, path, strict=False) if a is b]
                paths[operand.register] = tuple(common)
    return {register: path[-1] for register, path in paths.items()}


def dataflow(program: Program) -> Dataflow:
    home = homes(program)
    partial = {}
    for one in program.instructions():
        partly = 0
        for operand in one.operands:
            if isinstance(operand, Part) and operand.register.file != "s":
                whole = home[operand.register] is one.region and not one.region.manual
                partly |= 0 if whole else operand.mask & one.writes
        partial[one] = partly
    fixed = sum(((1 << one.dwords) - 1) << one.first_regunit for one in program.registers if one.fixed is not None)
    flow = Dataflow({}, {}, partial)
    _backward(program, flow)
    _forward(program, flow, fixed | _ALWAYS)
    return flow


def _backward(program: Program, flow: Dataflow) -> None:
    uses, kills = {}, {}
    for block in program.blocks:
        use = kill = 0
        for one in reversed(block.instructions):
            use = (use & ~flow.kills(one)) | flow.uses(one)
            kill |= flow.kills(one)
        uses[block], kills[block] = use, kill
        flow.live_out[block] = 0
    live_in, changed = dict.fromkeys(program.blocks, 0), True
    while changed:
        changed = False
        for block in reversed(program.blocks):
            out = 0
            for successor in block.successors:
                out |= live_in[successor]
            now = uses[block] | (out & ~kills[block])
            flow.live_out[block] = out
            if now != live_in[block]:
                live_in[block], changed = now, True


def _forward(program: Program, flow: Dataflow, start: int) -> None:
    writes = {}
    for block in program.blocks:
        writes[block] = 0
        for one in block.instructions:
            writes[block] |= one.writes
    flow.defined_in.update(dict.fromkeys(program.blocks, 0))
    flow.defined_in[program.blocks[0]] = start
    changed = True
    while changed:
        changed = False
        for block in program.blocks:
            out = flow.defined_in[block] | writes[block]
            for successor in block.successors:
                if out & ~flow.defined_in[successor]:
                    flow.defined_in[successor] |= out
                    changed = True


def check_written(program: Program, flow: Dataflow) -> None:
    """Raises CompileError where a register is read that is written on no path to the read."""
    for block in program.reached():
        written = flow.defined_in[block]
        for one in block.instructions:
            for operand, slot in zip(one.operands, one.form.operands, strict=True):
                if isinstance(operand, Part) and slot.use == "" and operand.mask & ~written:
                    name, line = operand.register.name, operand.register.line
                    fail(f"{one.name} reads {name} of {line} before anything is written there", one.line)
            written |= one.writes
