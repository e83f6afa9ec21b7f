"""``accelpatch profile counters``: hardware counters of kernels, by the tools of AMD and NVIDIA."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.profiling.counters import KernelCounters
    from accelpatch.profiling.tools import Ran


def counters(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Results to read: rocpd's .db, .csv, .pftrace, .json, or a folder."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="COMMAND", help="Run this program under a tool, and read the result.")
    ] = None,
    tool: Annotated[
        str, typer.Option("--tool", metavar="NAME", help="rocprofv3, rocprof-compute or ncu; auto: the one found.")
    ] = "auto",
    names: Annotated[
        str | None,
        typer.Option("--counters", metavar="A,B,...", help="Counters by the tool's names; default: a small set."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for the tool's files.")
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
    found, left = _read(files or [], said)
    if json:
        console.print_json({"kernels": [one.to_dict() for one in found], "left_out": left, "notes": said})
    elif found:
        print(reading.text(found))
    for line in [*said, *(f"left out: {one}" for one in left)]:
        console.warning(line)


def _read(files: list[Path], said: list[str]) -> tuple[list[KernelCounters], list[str]]:
    """The kernels of files, and messages about what was left out. said: the messages of the run; with these, a file
    that cannot be read is no error, since the run may have recorded nothing."""
    from accelpatch.profiling import counters as reading

    found, left = list["KernelCounters"](), list[str]()
    for file in files:
        try:
            more, skipped = reading.read(file)
        except AccelpatchError:
            if not said:
                raise
            continue
        found, left = found + more, left + skipped
    return found, left


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
