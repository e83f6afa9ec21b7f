"""A list scheduler: moves independent instructions to where the hardware would stall.

Only instructions between two fences are reordered: fences are control flow, waits, barriers, changes of the exec mask,
and instructions whose effects no register shows. Memory instructions keep their order. Where nothing would stall, the
order stays that of the kernel, so that live ranges become no longer than they have to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from accelpatch.jit.ir import HIDDEN, Instruction, Part, Program
from accelpatch.jit.passes.allocation import Places
from accelpatch.jit.passes.hazards import wait_states
from accelpatch.jit.passes.liveness import bits
from accelpatch.jit.passes.matrix import passes
from accelpatch.jit.passes.physical import BASE, Placed, placed

_EXEC = 3 << HIDDEN["exec"][0]
_MEMORY = ("smem", "ds", "flat", "global", "scratch", "buffer")
#: instructions that may go before another one
WINDOW = 48
#: file -> registers of one piece that is put in order
_MOST: Mapping[str, int] = {"s": 102, "v": 256}
#: unit -> slots of instructions until a result can be used; of loads what llvm-mca takes, or more
_LATENCY: Mapping[str, int] = {"smem": 20, "ds": 20, "flat": 80, "global": 80, "scratch": 80, "buffer": 80, "trans": 4}
_STATE = ("s_setreg", "s_getreg", "s_memtime", "s_memrealtime", "s_dcache", "s_getpc", "s_setpc", "s_swappc", "s_call",
          "s_rfe", "s_sendmsg", "s_cbranch")  # fmt: skip


def hide_stalls(program: Program) -> None:
    for block in program.blocks:
        made: list[Instruction] = []
        for run in _runs(block.instructions):
            for some, places in _parts(run):
                made += _scheduled(program.arch, some, places)
        block.instructions = made


def _runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The instructions between fences, and each fence by itself."""
    run: list[Instruction] = []
    for one in instructions:
        fence = one.form.unit == "control" or one.writes & _EXEC or one.name.startswith(_STATE)
        if run and (fence or one.region is not run[-1].region):
            yield run
            run = []
        if fence:
            yield [one]
        else:
            run.append(one)
    yield run


@dataclass(eq=False)
class Step:
    """An instruction to be placed. after: those that follow it -> slots until then. waits: of how many it must."""

    at: int
    made: Placed
    after: dict[Step, int] = field(default_factory=dict)
    waits: int = 0
    earliest: int = 0

    def before(self, other: Step, slots: int) -> None:
        if other is not self:
            other.waits += other not in self.after
            self.after[other] = max(self.after.get(other, 0), slots)


def _parts(run: Sequence[Instruction]) -> Iterator[tuple[list[Instruction], Places]]:
    """A run in pieces, each with a place for every register of its own, none in common: by these the rules on wait
    states find what depends on what. A piece ends where a file has no more places."""
    some: list[Instruction] = []
    places, used = Places(), dict.fromkeys(BASE, 0)
    for one in run:
        registers = {operand.register for operand in one.operands if isinstance(operand, Part)} - places.of.keys()
        need = {file: used[file] + sum(each.dwords for each in registers if each.file == file) for file in BASE}
        if some and any(need[file] > most for file, most in _MOST.items()):
            yield some, places
            some, places, used = [], Places(), dict.fromkeys(BASE, 0)
            registers = {operand.register for operand in one.operands if isinstance(operand, Part)}
        for each in sorted(registers, key=lambda register: register.unit):
            places.of[each] = used[each.file]
            used[each.file] += each.dwords
        some.append(one)
    yield some, places


def _scheduled(arch: str, run: list[Instruction], places: Places) -> list[Instruction]:
    steps = [Step(at, placed(one, places)) for at, one in enumerate(run)]
    _connect(arch, steps)
    made: list[Instruction] = []
    waiting, now = steps, 0
    while waiting:
        near = [one for one in waiting[:WINDOW] if not one.waits]
        best = min(near, key=lambda one: (max(one.earliest, now), one.at))
        waiting.remove(best)
        now = max(best.earliest, now)
        for other, slots in best.after.items():
            other.waits -= 1
            other.earliest = max(other.earliest, now + slots)
        now += 1
        made.append(best.made.one)
    return made


def _connect(arch: str, steps: Sequence[Step]) -> None:
    """Say of each step which must follow it."""
    writer: dict[int, Step] = {}
    readers: dict[int, list[Step]] = {}
    memory: Step | None = None
    for step in steps:
        one = step.made.one
        for unit in bits(one.reads):
            if unit in writer:
                writer[unit].before(step, _slots(arch, writer[unit].made, step.made))
            readers.setdefault(unit, []).append(step)
        for unit in bits(one.writes):
            for reader in readers.pop(unit, ()):
                reader.before(step, max(1, wait_states(arch, reader.made, step.made) + 1))
            if unit in writer:
                writer[unit].before(step, max(1, wait_states(arch, writer[unit].made, step.made) + 1))
            writer[unit] = step
            if one.reads >> unit & 1:
                readers[unit] = [step]
        if one.form.unit in _MEMORY:
            if memory is not None:
                memory.before(step, 1)
            memory = step


def _slots(arch: str, first: Placed, second: Placed) -> int:
    """Slots until an instruction can read what another one wrote."""
    slots = _LATENCY.get(first.unit, 1)
    if first.unit == "matrix":
        slots = passes(first.name, arch)
    return max(slots, wait_states(arch, first, second) + 1)
