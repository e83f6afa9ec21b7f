"""Puts the wait for the kernel's arguments as late as it may be: what needs none of them runs while they are loaded."""

from __future__ import annotations

from accelpatch.jit.ir import HIDDEN, Instruction, Program

_EXEC = ((1 << HIDDEN["exec"][1]) - 1) << HIDDEN["exec"][0]
_COMPUTES = ("salu", "valu", "trans", "matrix")


def hide_argument_loads(program: Program) -> None:
    block = program.blocks[0]
    waits = [one for one in block.instructions if one.own and one.name == "s_waitcnt"]
    if not waits:
        return
    at = block.instructions.index(waits[0])
    loads = [one for one in block.instructions[:at] if one.own and one.form.unit == "smem"]
    if not loads:  # none of the arguments is used
        block.instructions.remove(waits[0])
        return
    pending = 0
    for one in loads:
        pending |= one.writes
    early, late = _parted(block.instructions[at + 1 :], pending)
    block.instructions = [*block.instructions[:at], *early, waits[0], *late]


def _parted(instructions: list[Instruction], pending: int) -> tuple[list[Instruction], list[Instruction]]:
    """What may run before arguments are there, and the rest, each in its order."""
    early: list[Instruction] = []
    late: list[Instruction] = []
    reads, writes = 0, pending  # of all that is late
    for at, one in enumerate(instructions):
        if one.form.unit not in _COMPUTES or one.writes & _EXEC or one.name.startswith(("s_setreg", "s_getreg")):
            return early, [*late, *instructions[at:]]
        if one.reads & writes or one.writes & (reads | writes):
            late.append(one)
            reads, writes = reads | one.reads, writes | one.writes
        else:
            early.append(one)
    return early, late
