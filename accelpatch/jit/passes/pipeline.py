"""The passes in their order, and which of them may be left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from accelpatch.jit.ir import Program
from accelpatch.jit.passes.accumulator_moves import check_accumulators, move_accumulators
from accelpatch.jit.passes.allocation import Places, allocate, apart
from accelpatch.jit.passes.auto_waits import insert_waits
from accelpatch.jit.passes.common_subexpressions import share_subexpressions
from accelpatch.jit.passes.dead_blocks import remove_dead_blocks
from accelpatch.jit.passes.dead_code import remove_dead_code
from accelpatch.jit.passes.dead_stores import remove_dead_stores
from accelpatch.jit.passes.hide_argument_loads import hide_argument_loads
from accelpatch.jit.passes.hide_stalls import hide_stalls
from accelpatch.jit.passes.liveness import check_written, flow
from accelpatch.jit.passes.required_noops import insert_noops
from accelpatch.jit.passes.split_arrays import split_arrays
from accelpatch.jit.passes.waits import check_waits

Change = Callable[[Program], None]
#: passes that make the assembly better; a kernel is right without them
IMPROVING: Mapping[str, Change] = MappingProxyType({
    "dead_blocks": remove_dead_blocks, "common_subexpressions": share_subexpressions,
    "dead_stores": remove_dead_stores, "dead_code": remove_dead_code, "hide_argument_loads": hide_argument_loads,
    "hide_stalls": hide_stalls, "split_arrays": split_arrays,
})  # fmt: skip
#: those that hold values in registers for longer: the first to go where registers run out
HOLDING = ("common_subexpressions", "hide_stalls")
#: instructions after which nobody can say where the kernel goes on
_UNKNOWN = re.compile(r"s_(setpc|swappc|call|rfe|cbranch_\w*fork|cbranch_join)")


def run(program: Program, without: Collection[str] = ()) -> Places:
    """Run the passes, but for those in ``without``; returns where registers are. Raises CompileError with the line.

    Without auto_waits a wait is for all that is under way, without linear_scan each register has a place of its own.
    """
    improve = _improver(program, without)
    (check_accumulators if "accumulator_moves" in without else move_accumulators)(program)
    improve("dead_blocks")
    check_written(program, flow(program))
    if program.waits != "auto":
        check_waits(program)
    for name in ("common_subexpressions", "dead_stores", "dead_code", "hide_argument_loads", "hide_stalls"):
        improve(name)
    if program.waits == "auto":
        insert_waits(program, all_of_them="auto_waits" in without)
    improve("split_arrays")
    places = (apart if "linear_scan" in without else allocate)(program, flow(program), check_waits(program))
    if "required_noops" not in without:
        insert_noops(program, places)
    return places


def _improver(program: Program, without: Collection[str]) -> Callable[[str], None]:
    lost = next((one for one in program.instructions() if _UNKNOWN.match(one.name)), None)

    def improve(name: str) -> None:
        if name in without:
            return
        if lost is None:
            IMPROVING[name](program)
        else:
            program.note(name, f"the kernel is left as it is, as {lost.name} goes where no pass can see", lost.line)

    return improve
