"""Moves the wait for the kernel's arguments down: instructions that need no argument run while they are loaded."""

from __future__ import annotations

from accelpatch.jit.ir import Instruction, Program, special_regunits

_EXEC = special_regunits("exec")
_COMPUTES = ("salu", "valu", "trans", "matrix")


def hide_argument_loads(program: Program) -> None:
    block = program.blocks[0]
    waits = [one for one in block.instructions if one.in_prologue and one.name == "s_waitcnt"]
    if not waits:
        return
    at = block.instructions.index(waits[0])
    loads = [one for one in block.instructions[:at] if one.in_prologue and one.form.unit == "smem"]
    if not loads:  # none of the arguments is used
        block.instructions.remove(waits[0])
        return
    pending = 0
    for one in loads:
        pending |= one.writes
    early, late = _split(block.instructions[at + 1 :], pending)
    block.instructions = [*block.instructions[:at], *early, waits[0], *late]


def _split(instructions: list[Instruction], pending: int) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions that may run before the arguments are loaded, and the rest, both in their order. pending: the
    register units of the arguments."""
    early: list[Instruction] = []
    late: list[Instruction] = []
    reads, writes = 0, pending  # by the instructions of late
    for at, one in enumerate(instructions):
        if one.form.unit not in _COMPUTES or one.writes & _EXEC or one.name.startswith(("s_setreg", "s_getreg")):
            return early, [*late, *instructions[at:]]
        if one.reads & writes or one.writes & (reads | writes):
            late.append(one)
            reads, writes = reads | one.reads, writes | one.writes
        else:
            early.append(one)
    return early, late
