"""Removes blocks that nothing leads to, and jumps to the block that follows anyway."""

from __future__ import annotations

from accelpatch.jit.ir import Program


def remove_dead_blocks(program: Program) -> None:
    program.blocks = program.reached()
    for block, below in zip(program.blocks, program.blocks[1:], strict=False):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.name == "s_branch" and last.operands[0] == below.label:
            block.instructions.pop()
