"""Inserts the s_waitcnt that a kernel of ``waits="auto"`` omits: each as late as possible, with the largest counts that
suffice.

Besides the uses of loaded registers three things need a wait: a barrier, for the wavefront's accesses of LDS, whose
results other wavefronts may use next; an access of LDS, for direct loads from global memory into LDS; and s_dcache_wb,
for scalar stores.
"""

from __future__ import annotations

from accelpatch.jit.instructions import form_for, instruction
from accelpatch.jit.ir import Instruction, Program
from accelpatch.jit.location import fail
from accelpatch.jit.passes import waits
from accelpatch.jit.passes.waits import Access, State, needed_counts


def insert_waits(program: Program, *, all_of_them: bool = False) -> None:
    """all_of_them: every wait is for all outstanding accesses of its counters. Raises CompileError where the kernel
    itself has a wait that is too short for a later use."""
    form = form_for("s_waitcnt", program.arch, 1, "")
    for block, state in waits.entry_states(program, _step).items():
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
    """Counter -> the count of the s_waitcnt that must precede an instruction."""
    found: dict[str, int] = {}
    for _, access in _awaited(one, state):
        for name, count in needed_counts(access, state).items():
            found[name] = min(count, found.get(name, count))
    return found


def _awaited(one: Instruction, state: State) -> list[tuple[int | str, Access]]:
    """The outstanding accesses that must be complete before an instruction. For an access of LDS, direct loads into LDS
    count only as long as the kernel has no wait for them itself."""
    found: list[tuple[int | str, Access]] = list(waits.touched(one, state))
    lds = [(key, access) for key, access in state.outstanding.items() if str(key).startswith(waits.LDS)]
    if one.name == "s_barrier":
        found += lds
    elif one.form.unit in ("ds", "flat"):
        found += [(key, one) for key, one in lds if "vmcnt" in one.issued_since and one.short_wait is None]
    if one.name == "s_dcache_wb" and waits.SCALAR_STORE in state.outstanding:
        found.append((waits.SCALAR_STORE, state.outstanding[waits.SCALAR_STORE]))
    return found


def _check(one: Instruction, state: State) -> None:
    """Raise CompileError where the kernel has a wait that is too short: the jit does not lengthen it silently."""
    for key, access in _awaited(one, state):
        if access.short_wait is not None:
            counts = " ".join(f"{name}({count})" for name, count in needed_counts(access, state).items())
            wait = access.short_wait
            fail(f"{waits.too_early(one, key, access)}: the wait of {wait.line}, {wait.operands[0]}, leaves that under "
                 f"way, where {counts} is needed. Put J.s_waitcnt(mod=\"{counts}\") before it, or leave that wait out: "
                 'waits="auto" finds its own', one.line)  # fmt: skip
