"""``accelpatch profile kernels`` and ``counters``: what limits compiled kernels, and what hardware counted of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import build, console
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.profiling.code_objects import Kernel
    from accelpatch.profiling.counters import KernelCounters
    from accelpatch.profiling.tools import Ran

LEGEND = (
    "registers: vector registers a lane. spills: vector+scalar. scratch: bytes a lane. shared: bytes a block. waves:\n"
    "of a SIMD at once (NVIDIA: warps of a scheduler). one less: waves with one register less. wide: of 16 bytes.\n"
    "waits (all): those for memory, and those until all loads have come. trips: of values through shared memory, by\n"
    "Triton's IR. Instructions are counted once, however often a loop runs them."
)


def kernels(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help="A .s, .co, .hsaco or .cubin file, or a folder such as Triton's cache."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="ARCH", help="Of accelpatch's own kernels, which are compiled.")
    ] = None,
    library: Annotated[
        str | None, typer.Option("--library", metavar="NAME", help="One of accelpatch's own; default: all of them.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="ARCH", help="Print how many waves an arch holds by registers, and end."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show registers, shared memory, spills, occupancy and its limit, wide loads, waits and matrix instructions.

    Without FILE it compiles and shows accelpatch's own kernels for --arch.
    """
    if table is not None:
        _print_table(table, json)
        return
    if not files and arch is None:
        raise AccelpatchError("name files of compiled kernels, or an arch for accelpatch's own, such as --arch gfx942")
    if files and (arch or library):
        raise typer.BadParameter("goes without FILE: a file says its own arch", param_hint="--arch, --library")
    from accelpatch.profiling import code_objects, own_kernels

    found, left = list["Kernel"](), list[str]()
    for file in files or []:
        more, skipped = code_objects.read(file)
        found, left = found + more, left + skipped
    if not files:
        found = own_kernels.own(build.device_of(str(arch)), library)
    if json:
        console.print_json({"kernels": [one.to_dict() for one in found], "left_out": left})
    else:
        _print(found)
    for line in left:
        console.warning(f"left out: {line}")
    if not found:
        raise typer.Exit(1)


def _print(found: list[Kernel]) -> None:
    from accelpatch.report import table

    rows: list[tuple[str, ...]] = [(
        "kernel", "arch", "registers", "scalar", "spills", "scratch", "shared", "threads", "waves", "limited by",
        "one less", "more waves at", "loads (wide)", "waits (all)", "matrix", "shared r/w", "trips",
    )]  # fmt: skip
    for one in found:
        used, held, counts = one.used, one.occupancy, one.counts
        seen = ("", "", "", "") if counts is None else (
            f"{counts.loads} ({counts.wide_loads})", f"{counts.waits} ({counts.full_waits})", str(counts.matrix),
            f"{counts.shared_reads}/{counts.shared_writes}",
        )  # fmt: skip
        better = "" if held is None or held.next is None else f"{held.next[0]} registers: {held.next[1]}"
        limits = (
            ("", "", "", "")
            if held is None
            else (f"{held.waves} of {held.most}", held.limit, str(held.one_less), better)
        )
        rows.append((
            _plain(used.kernel), one.arch, str(used.registers), _known(one.scalars),
            f"{used.vector_spills}+{used.scalar_spills}", str(used.scratch), str(used.shared), str(used.threads),
            *limits, *seen, _known(one.trips),
        ))  # fmt: skip
    print(table(rows))
    print(LEGEND)
    for note in dict.fromkeys(f"{_plain(one.file)}: {note}" for one in found for note in one.notes):
        print(note)


def _known(number: int | None) -> str:
    return "" if number is None else str(number)


def _plain(name: str) -> str:
    """A name from a file without what a terminal would act on, and not too long."""
    shown = "".join(one if one.isprintable() else "?" for one in name)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _print_table(arch: str, json: bool) -> None:
    from accelpatch.profiling import limits
    from accelpatch.report import table

    found = limits.steps(arch)
    if json:
        console.print_json([{"registers": count, "waves": number} for count, number in found])
        return
    print(table([("registers up to", "waves"), *((str(count), str(number)) for count, number in found)]))


def counters(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Results to read: rocpd's .db, .csv, .pftrace, .json, or a folder."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="COMMAND", help="Run this program under a tool, and read the result.")
    ] = None,
    tool: Annotated[
        str, typer.Option("--tool", metavar="NAME", help="rocprofv3, rocprof-compute or ncu; auto: what is here.")
    ] = "auto",
    names: Annotated[
        str | None, typer.Option("--counters", metavar="A,B,...", help="The tool's counters; default: a few.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for what the tool writes.")
    ] = Path("counters"),
    json: JsonOption = False,
) -> None:
    """Show hardware counters of kernels, recorded by AMD's or NVIDIA's tools now (--run) or before (FILE)."""
    from accelpatch.profiling import counters as reading

    if bool(files) == bool(run):
        raise typer.BadParameter("give files to read, or a program to run: --run 'python script.py'", param_hint="FILE")
    said = list[str]()
    if run:
        ran = _ran(run, tool, names, out)
        said, files = list(ran.said), [ran.folder]
    found, left = list["KernelCounters"](), list[str]()
    for file in files or []:
        try:
            more, skipped = reading.read(file)
        except AccelpatchError:
            if not said:
                raise
            continue  # nothing was recorded, for the reason that is said
        found, left = found + more, left + skipped
    if json:
        console.print_json({"kernels": [one.to_dict() for one in found], "left_out": left, "notes": said})
    elif found:
        print(reading.text(found))
    for line in [*said, *(f"left out: {one}" for one in left)]:
        console.warning(line)


def _ran(run: str, tool: str, names: str | None, out: Path) -> Ran:
    from accelpatch.checkpoints import target
    from accelpatch.profiling import tools

    target.check_folder(out)
    target.check_empty(out)
    try:
        program = shlex.split(run)
    except ValueError as error:
        raise typer.BadParameter(f"{run!r} is no command: {error}", param_hint="--run") from None
    if not program:
        raise typer.BadParameter("it is empty", param_hint="--run")
    wanted = tools.chosen(tool)
    asked = tuple(filter(None, (names or "").split(","))) or tools.DEFAULTS[wanted]
    return tools.run(wanted, program, out, asked, console.note)
