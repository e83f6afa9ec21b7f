"""``accelpatch profile kernels``: what limits compiled kernels, ours and a user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import build, console
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.profiling.code_objects import Kernel

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
        str | None,
        typer.Option("--arch", metavar="ARCH", help="Compile and show accelpatch's own kernels for this arch."),
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
    found, left = _read(files or [], arch, library)
    if json:
        console.print_json({"kernels": [one.to_dict() for one in found], "left_out": left})
    else:
        _print(found)
    for line in left:
        console.warning(f"left out: {line}")
    if not found:
        raise typer.Exit(1)


def _read(files: list[Path], arch: str | None, library: str | None) -> tuple[list[Kernel], list[str]]:
    """The kernels of files, or our own for `arch`, and messages about what was left out."""
    from accelpatch.profiling import code_objects, own_kernels

    if not files:
        return own_kernels.own(build.device_of(str(arch)), library), []
    found, left = list["Kernel"](), list[str]()
    for file in files:
        more, skipped = code_objects.read(file)
        found, left = found + more, left + skipped
    return found, left


def _print(found: list[Kernel]) -> None:
    from accelpatch.report import table

    rows: list[tuple[str, ...]] = [(
        "kernel", "arch", "registers", "scalar", "spills", "scratch", "shared", "threads", "waves", "limited by",
        "one less", "more waves at", "loads (wide)", "waits (all)", "matrix", "shared r/w", "trips",
    )]  # fmt: skip
    for one in found:
        used, occupancy, counts = one.used, one.occupancy, one.counts
        seen = ("", "", "", "") if counts is None else (
            f"{counts.loads} ({counts.wide_loads})", f"{counts.waits} ({counts.full_waits})", str(counts.matrix),
            f"{counts.shared_reads}/{counts.shared_writes}",
        )  # fmt: skip
        better = (
            "" if occupancy is None or occupancy.next is None else f"{occupancy.next[0]} registers: {occupancy.next[1]}"
        )
        limits = (
            ("", "", "", "")
            if occupancy is None
            else (f"{occupancy.waves} of {occupancy.most}", occupancy.limit, str(occupancy.one_less), better)
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
    """A name from a file without control characters, and at most 60 characters long."""
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
