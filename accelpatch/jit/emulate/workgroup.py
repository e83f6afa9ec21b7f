"""Runs a workgroup: its waves side by side, each a few instructions at a time, in an order that a seed decides."""

from __future__ import annotations

import random
from dataclasses import dataclass

from accelpatch.jit.emulate.lds import Lds
from accelpatch.jit.emulate.memory import Memory
from accelpatch.jit.emulate.operands import VGPR, name_of
from accelpatch.jit.emulate.registry import Code, Instruction
from accelpatch.jit.emulate.scalar_control import BARRIER
from accelpatch.jit.emulate.wave import ALL, Wave

LONGEST_TURN = 64  # instructions that a wave runs before another may


@dataclass(eq=False)
class Workgroup:
    """What its waves have in common. number: (x, y, z). misaligned: whether such accesses are allowed."""

    number: tuple[int, int, int]
    memory: Memory
    lds: Lds
    misaligned: bool


def run(code: Code, waves: list[Wave], steps: int, order: random.Random) -> None:
    """Run all waves to their end. steps: most instructions of a wave."""
    running, waiting = list(waves), list[Wave]()
    while running or waiting:
        if not running:
            _release(waiting)
            running, waiting = waiting, []
        wave = order.choice(running) if len(running) > 1 else running[0]
        stop = _run_some(code, wave, steps, order.randint(1, LONGEST_TURN) if len(waves) > 1 else steps)
        if stop is None:
            continue
        running.remove(wave)
        if stop is BARRIER:
            waiting.append(wave)


def _release(waiting: list[Wave]) -> None:
    """All waves that have not ended are at a barrier: it opens."""
    for wave in waiting:
        wave.waits.at_barrier()
    waiting[0].group.lds.epoch += 1


def _run_some(code: Code, w: Wave, steps: int, most: int) -> object:
    """Run up to `most` instructions; what stopped the wave, or None."""
    end, ready = min(w.steps + most, steps), code.ready
    while w.steps < end:
        instruction = ready[w.pc] or code.decode(w.pc)
        if w.waits.marked:
            w.waits.check(instruction.line, instruction.waits_for, instruction.writes)
        if w.wait_states is not None:
            w.wait_states.issue(instruction.traits)
        if w.strict:
            check_defined(w, instruction)
        w.pc += 1
        w.steps += 1
        stop = instruction.execute(w)
        if stop is not None:
            return stop
    if w.steps < steps:
        return None
    raise code.decode(w.pc).line.fault(
        f"wave {w.number} has run {steps} instructions and is here: a loop that never ends, or pass a larger steps="
    )


def check_defined(w: Wave, instruction: Instruction) -> None:
    """Raise where an instruction reads a register that nothing has written; note those that it writes."""
    defined = w.defined
    needed = ALL if instruction.whole else w.exec
    for register in instruction.reads:
        missing = (needed if register >= VGPR else ALL) & ~defined[register]
        if missing:
            lane = (missing & -missing).bit_length() - 1
            where = f" in lane {lane}" if register >= VGPR else ""
            raise instruction.line.fault(f"wave {w.number} reads {name_of(register)}{where}, which nothing has written")
    for register in instruction.writes:
        defined[register] |= w.exec if register >= VGPR else ALL
