"""``accelpatch build``: the kernel libraries ahead of their first use, also for a machine that is not here."""

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
        typer.Option("--arch", metavar="ARCH", help="gfx942, sm_90, ..., or host for this CPU; can be given again."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Where to; the user's cache otherwise.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Also say what each GPU kernel takes.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile the kernels for ARCH; a machine with ACCELPATCH_KERNELS=DIR takes them from there, without a compiler."""
    from accelpatch.kernels import build as building

    found: list[dict[str, Any]] = []
    for name in arch or [HOST]:
        device = device_of(name)
        library = "cpu" if device.kind == "cpu" else "hip"
        made = building.target(library, device)
        folder = building.export(library, device, out) if out else building.built(library, made)
        kernels = building.report(made) if report and library == "hip" else []
        found.append({"library": library, "arch": made.arch, "folder": str(folder), "kernels": kernels})
    if json:
        console.print_json(found)
        return
    for item in found:
        print(f"{item['library']} for {item['arch']}: {item['folder']}")
        if item["kernels"]:
            _print(item["kernels"])


def device_of(arch: str) -> Device:
    """The device that ``--arch`` names: this machine's CPU, or a GPU that need not be here."""
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
        "registers: vector registers a lane. spills: registers. scratch, shared: bytes fixed at compile time, to\n"
        "which a launch adds the room for its tokens. waves: resident on a SIMD or scheduler, by what stands here."
    )
