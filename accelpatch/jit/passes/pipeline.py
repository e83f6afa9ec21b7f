"""Runs the passes in their order. Most of them can be left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from accelpatch.jit.ir import Program
from accelpatch.jit.passes.accumulator_moves import check_accumulators, move_accumulators
from accelpatch.jit.passes.allocation import Allocation, allocate, allocate_without_sharing
from accelpatch.jit.passes.auto_waits import insert_waits
from accelpatch.jit.passes.common_subexpressions import reuse_subexpressions
from accelpatch.jit.passes.dead_blocks import remove_dead_blocks
from accelpatch.jit.passes.dead_code import remove_dead_code
from accelpatch.jit.passes.dead_stores import remove_dead_stores
from accelpatch.jit.passes.hide_argument_loads import hide_argument_loads
from accelpatch.jit.passes.hide_stalls import hide_stalls
from accelpatch.jit.passes.liveness import check_written, dataflow
from accelpatch.jit.passes.required_noops import insert_noops
from accelpatch.jit.passes.split_arrays import split_arrays
from accelpatch.jit.passes.waits import check_waits

Change = Callable[[Program], None]
#: passes that only optimise; a kernel is correct without them
IMPROVING: Mapping[str, Change] = MappingProxyType({
    "dead_blocks": remove_dead_blocks, "common_subexpressions": reuse_subexpressions,
    "dead_stores": remove_dead_stores, "dead_code": remove_dead_code, "hide_argument_loads": hide_argument_loads,
    "hide_stalls": hide_stalls, "split_arrays": split_arrays,
})  # fmt: skip
#: those that lengthen live ranges: left out where registers run out
LENGTHENING = ("common_subexpressions", "hide_stalls")
#: jumps whose target is known only at run time
_INDIRECT = re.compile(r"s_(setpc|swappc|call|rfe|cbranch_\w*fork|cbranch_join)")


def run(program: Program, without: Collection[str] = ()) -> Allocation:
    """Run the passes except those in ``without``; returns the register allocation. Raises CompileError with the line.

    auto_waits and linear_scan cannot be skipped: without the first every wait is for all outstanding accesses, without
    the second no two virtual registers share a physical one.
    """
    improve = _improver(program, without)
    (check_accumulators if "accumulator_moves" in without else move_accumulators)(program)
    improve("dead_blocks")
    check_written(program, dataflow(program))
    if program.waits != "auto":
        check_waits(program)
    for name in ("common_subexpressions", "dead_stores", "dead_code", "hide_argument_loads", "hide_stalls"):
        improve(name)
    if program.waits == "auto":
        insert_waits(program, all_of_them="auto_waits" in without)
    improve("split_arrays")
    allocator = allocate_without_sharing if "linear_scan" in without else allocate
    allocation = allocator(program, dataflow(program), check_waits(program))
    if "required_noops" not in without:
        insert_noops(program, allocation)
    return allocation


def _improver(program: Program, without: Collection[str]) -> Callable[[str], None]:
    """A function that runs the pass of a name, unless it is left out, or an indirect jump makes the control flow
    unknown."""
    jump = next((one for one in program.instructions() if _INDIRECT.match(one.name)), None)

    def improve(name: str) -> None:
        if name in without:
            return
        if jump is None:
            IMPROVING[name](program)
        else:
            program.note(name, f"the kernel is left as it is, as {jump.name} goes where no pass can see", jump.line)

    return improve
