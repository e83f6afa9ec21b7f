"""``accelpatch build``: compile the kernel libraries ahead of time, also for another machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.device import Device

HOST = "host"


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="ARCH", help="gfx942, sm_90, ..., or host: this CPU (default); repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Output folder; default: the cache.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also list registers, spills and shared memory of each GPU kernel.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compile the kernels for ARCH. A machine with ACCELPATCH_KERNELS=DIR loads them from DIR and needs no compiler."""
    from accelpatch.checkpoints import target

    if out:
        target.check_folder(out)
    from accelpatch.kernels.compiling import libraries as building

    found: list[dict[str, Any]] = []
    for device in [device_of(name) for name in arch or [HOST]]:
        libraries = building.names_of(device)
        folders = building.build(libraries, device)
        if out:
            folders = [building.export(library, device, out) for library in libraries]
        targets = [building.target(library, device) for library in libraries]
        reports = building.report(targets) if report and device.kind != "cpu" else [[]] * len(targets)
        for library, made, folder, kernels in zip(libraries, targets, folders, reports, strict=True):
            found.append({"library": library, "arch": made.arch, "folder": str(folder), "kernels": kernels})
    if json:
        console.print_json(found)
        return
    for item in found:
        print(f"{item['library']} for {item['arch']}: {item['folder']}")
        if item["kernels"]:
            _print(item["kernels"])


def device_of(arch: str) -> Device:
    """The device that ``--arch`` names: this machine's CPU, or a GPU, which need not be in this machine."""
    import platform

    from accelpatch import device as devices
    from accelpatch.errors import KernelError

    if arch in (HOST, "cpu", platform.machine()):
        return devices.probe("cpu")
    if arch not in devices.KNOWN:
        known = ", ".join((HOST, *devices.KNOWN))
        raise KernelError(f"there are no kernels for the arch {arch!r}; there are for: {known}")
    return devices.KNOWN[arch]


def _print(kernels: list[dict[str, Any]]) -> None:
    from accelpatch.report import table

    heads = ("kernel", "registers", "spills", "scalar spills", "scratch", "shared", "threads", "waves")
    rows: list[tuple[str, ...]] = [heads, *(tuple(map(str, kernel.values())) for kernel in kernels)]
    print(table(rows))
    print(
        "registers: vector registers per lane. spills: number of spilled registers. scratch: bytes per lane. shared:\n"
        "bytes per block, static; a launch adds dynamic shared memory for its tokens. waves: wavefronts or warps that\n"
        "fit a SIMD or scheduler at once with these resources."
    )
