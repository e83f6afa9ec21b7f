"""Inserts the waits that a kernel of ``waits="auto"`` leaves out: each as late as it may be, for as few as it needs.

Before a barrier what the wavefront read and wrote in LDS is waited for, as other wavefronts go on from there; before an
access of LDS, what memory loads into it past the registers; before the cache of scalar memory is written back, what was
stored there.
"""

from __future__ import annotations

from accelpatch.jit.instructions import form_for, instruction
from accelpatch.jit.ir import Instruction, Program
from accelpatch.jit.location import fail
from accelpatch.jit.passes.waits import LDS, STORED, Load, State, early, entries, left, touched


def insert_waits(program: Program, *, all_of_them: bool = False) -> None:
    """all_of_them: every wait is until nothing is under way. Raises CompileError where a wait of the kernel's own
    leaves under way what is then used without another one."""
    form = form_for("s_waitcnt", program.arch, 1, "")
    for block, state in entries(program, _step).items():
        made: list[Instruction] = []
        for one in block.instructions:
            _check(one, state)
            wanted = _needed(one, state)
            if wanted:
                counts = " ".join(f"{name}({0 if all_of_them else wanted[name]})" for name in sorted(wanted)[::-1])
                made.append(instruction(form, [counts], "", one.line, one.region))
            made.append(one)
            _step(state, one)
        block.instructions = made


def _step(state: State, one: Instruction) -> None:
    for name, value in _needed(one, state).items():
        state.wait(name, value)
    state.step(one)


def _needed(one: Instruction, state: State) -> dict[str, int]:
    """Counter -> what must be waited for before an instruction."""
    found: dict[str, int] = {}
    for _, load in _awaited(one, state):
        for name, count in left(load, state).items():
            found[name] = min(count, found.get(name, count))
    return found


def _awaited(one: Instruction, state: State) -> list[tuple[int | str, Load]]:
    """What an instruction must come after: loads of its registers; of a barrier, accesses of LDS; of accesses of LDS,
    what memory loads into it past the registers, unless the kernel has had a wait for that itself."""
    found: list[tuple[int | str, Load]] = list(touched(one, state))
    lds = [(unit, load) for unit, load in state.loads.items() if isinstance(unit, str) and unit.startswith(LDS)]
    if one.name == "s_barrier":
        found += lds
    elif one.form.unit in ("ds", "flat"):
        found += [(unit, load) for unit, load in lds if "vmcnt" in load.after and load.left is None]
    if one.name == "s_dcache_wb" and STORED in state.loads:
        found.append((STORED, state.loads[STORED]))
    return found


def _check(one: Instruction, state: State) -> None:
    """Raise the error for a kernel's own wait that does not cover what is needed: none is added to it silently."""
    for unit, load in _awaited(one, state):
        if load.left is not None:
            counts = " ".join(f"{name}({count})" for name, count in left(load, state).items())
            fail(f"{early(one, unit, load)}: the wait of {load.left.line}, {load.left.operands[0]}, leaves that under "
                 f"way, where {counts} is needed. Put J.s_waitcnt(mod=\"{counts}\") before it, or leave that wait out: "
                 'waits="auto" finds its own', one.line)  # fmt: skip
