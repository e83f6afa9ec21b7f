"""From a Python function to assembly: trace it, then run the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.jit.builder import Builder
from accelpatch.jit.emission import assembly
from accelpatch.jit.ir import Program
from accelpatch.jit.location import Line, fail
from accelpatch.jit.passes.allocation import Places, allocate
from accelpatch.jit.passes.dead_code import remove_dead_code
from accelpatch.jit.passes.liveness import check_written, flow
from accelpatch.jit.passes.noops import insert_noops
from accelpatch.jit.passes.unreachable import remove_unreachable
from accelpatch.jit.passes.waits import check_waits
from accelpatch.jit.table import ARCHS
from accelpatch.jit.types import Argument


@dataclass(frozen=True)
class Compiled:
    """A kernel for one arch and one set of compile-time arguments."""

    program: Program
    places: Places
    assembly: str

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def lds(self) -> int:
        """Bytes of LDS of a workgroup."""
        return self.program.lds


def compiled(
    function: Callable[..., Any], arch: str, threads: int, arguments: Sequence[Argument],
    constants: Mapping[str, object],
) -> Compiled:  # fmt: skip
    """Raises CompileError, with the Python line, for all that is wrong with the kernel."""
    code = function.__code__
    line = Line(code.co_filename, code.co_firstlineno)
    if arch not in ARCHS.values():
        fail(f"arch {arch!r} is none that the jit knows: {', '.join(ARCHS.values())}", line)
    program = Program(function.__name__, arch, threads, tuple(arguments), line)
    J = Builder(program)
    values = dict(zip((one.name for one in arguments), J.prologue.arguments, strict=True))
    function(J, **constants, **values)
    J.line = line
    if any(one.name.startswith(("s_store", "s_buffer_store")) for one in program.instructions()):
        J.emit("s_dcache_wb")  # what scalars stored lies in a cache that nothing else reads
    J.emit("s_endpgm")
    J.prologue.finish()
    places = run_passes(program)
    return Compiled(program, places, assembly(program, places, J.prologue.items))


def run_passes(program: Program) -> Places:
    """The passes in their order; the last one needs to know where the registers are."""
    remove_unreachable(program)
    check_written(program, flow(program))
    check_waits(program)
    remove_dead_code(program)
    places = allocate(program, flow(program), check_waits(program))
    insert_noops(program, places)
    return places
