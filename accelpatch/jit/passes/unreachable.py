"""Removes blocks that nothing leads to, and jumps to the block that follows anyway."""

from __future__ import annotations

from accelpatch.jit.ir import Block, Program


def remove_unreachable(program: Program) -> None:
    reached: set[Block] = set()
    waiting = [program.blocks[0]]
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting += block.next
    program.blocks = [block for block in program.blocks if block in reached]
    for block, below in zip(program.blocks, program.blocks[1:], strict=False):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.name == "s_branch" and last.operands[0] == below.label:
            block.instructions.pop()
