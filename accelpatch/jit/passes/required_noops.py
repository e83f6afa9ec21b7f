"""Inserts s_nop where the hardware needs wait states between two instructions."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.jit.instructions import form_for, instruction
from accelpatch.jit.ir import Block, Instruction, Program
from accelpatch.jit.passes.allocation import Places
from accelpatch.jit.passes.hazards import around_double, wait_states
from accelpatch.jit.passes.matrix import is_double
from accelpatch.jit.passes.physical import Placed, placed

#: the most wait states that any rule asks for after matrix instructions, and after others
_FURTHEST, _FAR = 20, 5


def insert_noops(program: Program, places: Places) -> None:
    before: dict[Block, list[Block]] = {block: [] for block in program.blocks}
    for block in program.blocks:
        for after in block.next:
            before[after].append(block)
    matrix = [one.name for one in program.instructions() if one.form.unit == "matrix"]
    rules = Rules(program.arch, program.arch == "gfx90a" and any(map(is_double, matrix)), _FURTHEST if matrix else _FAR)
    form = form_for("s_nop", program.arch, 1, "")
    made: dict[Instruction, Placed] = {one: placed(one, places) for one in program.instructions()}
    for block in program.blocks:
        done: list[Instruction] = []
        for one in block.instructions:
            need = _missing(rules, made, before, block, done, one)
            while need > 0:
                count = min(need, 8)
                done.append(instruction(form, [str(count - 1)], "", one.line, one.region))
                made[done[-1]] = placed(done[-1], places)
                need -= count
            done.append(one)
        block.instructions = done


@dataclass(frozen=True)
class Rules:
    """arch; whether products of 64 bits ask for more; how many wait states back it is worth looking."""

    arch: str
    doubles: bool
    furthest: int

    def between(self, first: Placed, second: Placed) -> int:
        need = wait_states(self.arch, first, second)
        return max(need, around_double(first, second)) if self.doubles else need


def _missing(
    rules: Rules, made: dict[Instruction, Placed], before: dict[Block, list[Block]], block: Block,
    done: list[Instruction], one: Instruction,
) -> int:  # fmt: skip
    """Wait states that are missing before an instruction, on any way to it."""
    if one.form.unit == "control" and not one.form.reads:
        return 0
    need = 0
    seen: dict[Block, int] = {}
    waiting: list[tuple[Block, list[Instruction], int]] = [(block, done, 0)]
    while waiting:
        at, instructions, distance = waiting.pop()
        for earlier in reversed(instructions):
            if distance >= rules.furthest:
                break
            if earlier.form.unit == "matrix" or (distance < _FAR and earlier.form.unit != "control"):
                need = max(need, rules.between(made[earlier], made[one]) - distance)
            distance += int(str(earlier.operands[0]), 0) + 1 if earlier.name == "s_nop" else 1
        if distance < rules.furthest:
            for other in before[at]:
                if seen.get(other, rules.furthest) > distance:
                    seen[other] = distance
                    waiting.append((other, other.instructions, distance))
    return need
