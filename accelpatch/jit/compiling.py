"""From a Python function to assembly: trace it, then run the passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.jit.builder import Builder
from accelpatch.jit.emission import assembly
from accelpatch.jit.ir import Program
from accelpatch.jit.location import Line, fail
from accelpatch.jit.passes import pipeline
from accelpatch.jit.passes.allocation import Allocation, OutOfRegisters
from accelpatch.jit.table import ARCHS
from accelpatch.jit.types import Argument


@dataclass(frozen=True)
class Compiled:
    """A kernel for one arch and one set of compile-time arguments."""

    program: Program
    allocation: Allocation
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
    constants: Mapping[str, object], *, waits: str = "checked", without: Collection[str] = (),
) -> Compiled:  # fmt: skip
    """waits and without: as in ``jit()``. If registers run out, the kernel is compiled again without the passes that
    lengthen live ranges. Raises CompileError, with the Python line, for a kernel that is wrong."""
    code = function.__code__
    line = Line(code.co_filename, code.co_firstlineno)
    if arch not in ARCHS.values():
        fail(f"arch {arch!r} is none that the jit knows: {', '.join(ARCHS.values())}", line)
    program = Program(function.__name__, arch, threads, tuple(arguments), line, waits=waits)
    J = _built(program, function, constants)
    try:
        allocation = pipeline.run(program, without)
    except OutOfRegisters:
        if set(pipeline.LENGTHENING) <= set(without):
            raise
        fewer = {*without, *pipeline.LENGTHENING}
        made = compiled(function, arch, threads, arguments, constants, waits=waits, without=fewer)
        made.program.note(" and ".join(pipeline.LENGTHENING), "left out, as registers run out with them", line)
        return made
    return Compiled(program, allocation, assembly(program, allocation, J.prologue.dimension))


def _built(program: Program, function: Callable[..., Any], constants: Mapping[str, object]) -> Builder:
    """Call the function, which fills the program."""
    J = Builder(program)
    values = dict(zip((one.name for one in program.arguments), J.prologue.arguments, strict=True))
    function(J, **constants, **values)
    J.line = program.line
    if any(one.name.startswith(("s_store", "s_buffer_store")) for one in program.instructions()):
        J.emit("s_dcache_wb")  # scalar stores stay in the scalar cache, which is not coherent, until it is written back
    J.emit("s_endpgm")
    J.prologue.finish()
    return J
