"""Copies accumulators (AGPRs) to vector registers, and back, around instructions that cannot have them as operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accelpatch.jit.instructions import form_for, instruction, takes_copy
from accelpatch.jit.ir import Instruction, Part, Program
from accelpatch.jit.location import fail


def move_accumulators(program: Program) -> None:
    for block in program.blocks:
        block.instructions = [made for one in block.instructions for made in _moved(program, one)]


def check_accumulators(program: Program) -> None:
    """Raises CompileError for the first accumulator that needs a copy and has none."""
    for one in program.instructions():
        for operand, slot in zip(one.operands, one.form.operands, strict=True):
            if isinstance(operand, Part) and takes_copy(operand, slot):
                fail(f"{operand.register.name} is an accumulator, where {one.name} takes a vector register", one.line)


def _moved(program: Program, one: Instruction) -> Iterator[Instruction]:
    """The instruction, preceded and followed by the copies that it needs."""
    operands, before, after = list(one.operands), list[Instruction](), list[Instruction]()
    for at, (operand, slot) in enumerate(zip(one.operands, one.form.operands, strict=True)):
        if isinstance(operand, Part) and takes_copy(operand, slot):
            register = program.new_register("v", operand.dwords, one.line, f"a copy of {operand.register.name}")
            copy = Part(register, 0, operand.dwords)
            operands[at] = Part(register, 0, operand.dwords, operand.sign)
            if slot.reads or operand.mask & one.reads:
                before += _copies("v_accvgpr_read_b32", program.arch, one, copy, operand)
            if slot.writes:
                after += _copies("v_accvgpr_write_b32", program.arch, one, operand, copy)
    if before or after:
        one = instruction(one.form, operands, one.mod, one.line, one.region)
    yield from (*before, one, *after)


def _copies(name: str, arch: str, around: Instruction, target: Part, source: Part) -> Sequence[Instruction]:
    form = form_for(name, arch, 2, "")
    return [
        instruction(form, [Part(target.register, target.first + at, 1), Part(source.register, source.first + at, 1)],
                    "", around.line, around.region)
        for at in range(target.dwords)
    ]  # fmt: skip
