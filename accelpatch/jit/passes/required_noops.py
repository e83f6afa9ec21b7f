"""Inserts s_nop where the hardware needs wait states between two instructions."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.jit.instructions import form_for, instruction
from accelpatch.jit.ir import Block, Instruction, Program
from accelpatch.jit.passes.allocation import Allocation
from accelpatch.jit.passes.hazards import around_double, wait_states
from accelpatch.jit.passes.matrix import is_double
from accelpatch.jit.passes.physical import Physical, physical

#: the most wait states that any rule needs after matrix instructions, and after others
_MATRIX_REACH, _REACH = 20, 5


def insert_noops(program: Program, allocation: Allocation) -> None:
    predecessors: dict[Block, list[Block]] = {block: [] for block in program.blocks}
    for block in program.blocks:
        for successor in block.successors:
            predecessors[successor].append(block)
    matrix = [one.name for one in program.instructions() if one.form.unit == "matrix"]
    doubles = program.arch == "gfx90a" and any(map(is_double, matrix))
    rules = Rules(program.arch, doubles, _MATRIX_REACH if matrix else _REACH)
    form = form_for("s_nop", program.arch, 1, "")
    physicals: dict[Instruction, Physical] = {one: physical(one, allocation) for one in program.instructions()}
    for block in program.blocks:
        emitted: list[Instruction] = []
        for one in block.instructions:
            need = _missing(rules, physicals, predecessors, block, emitted, one)
            while need > 0:
                count = min(need, 8)
                emitted.append(instruction(form, [str(count - 1)], "", one.line, one.region))
                physicals[emitted[-1]] = physical(emitted[-1], allocation)
                need -= count
            emitted.append(one)
        block.instructions = emitted


@dataclass(frozen=True)
class Rules:
    """doubles: whether the kernel has f64 matrix instructions on gfx90a, see around_double. reach: how many wait states
    back an earlier instruction may matter."""

    arch: str
    doubles: bool
    reach: int

    def between(self, first: Physical, second: Physical) -> int:
        need = wait_states(self.arch, first, second)
        return max(need, around_double(first, second)) if self.doubles else need


def _missing(
    rules: Rules, physicals: dict[Instruction, Physical], predecessors: dict[Block, list[Block]], block: Block,
    emitted: list[Instruction], one: Instruction,
) -> int:  # fmt: skip
    """How many wait states are missing before an instruction: the most over all paths to it."""
    if one.form.unit == "control" and not one.form.reads:
        return 0
    need = 0
    visited: dict[Block, int] = {}
    to_visit: list[tuple[Block, list[Instruction], int]] = [(block, emitted, 0)]
    while to_visit:
        at, instructions, distance = to_visit.pop()
        for earlier in reversed(instructions):
            if distance >= rules.reach:
                break
            if earlier.form.unit == "matrix" or (distance < _REACH and earlier.form.unit != "control"):
                need = max(need, rules.between(physicals[earlier], physicals[one]) - distance)
            distance += int(str(earlier.operands[0]), 0) + 1 if earlier.name == "s_nop" else 1
        if distance < rules.reach:
            for other in predecessors[at]:
                if visited.get(other, rules.reach) > distance:
                    visited[other] = distance
                    to_visit.append((other, other.instructions, distance))
    return need
