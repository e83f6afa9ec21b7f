"""Removes unreachable blocks, and jumps to the next block."""

from __future__ import annotations

from accelpatch.jit.ir import Program


def remove_dead_blocks(program: Program) -> None:
    program.blocks = program.reached()
    for block, below in zip(program.blocks, program.blocks[1:], strict=False):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.name == "s_branch" and last.operands[0] == below.label:
            block.instructions.pop()
