"""``accelpatch doctor fault``: run a program, and name the kernel behind a memory fault of the GPU."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import console, facts
from .options import JsonOption, file_option

if TYPE_CHECKING:
    from accelpatch.doctor.fault import Found
    from accelpatch.doctor.fault_logs import Fault

# Everything after the program's name is passed to the program, even if it looks like one of our options.
CONTEXT = {"allow_interspersed_args": False}
ProgramArgument = Annotated[
    list[str] | None, typer.Argument(metavar="COMMAND [ARGS]", help="The program and its own arguments.")
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", file_okay=False, help="New folder for logs and code objects.")
]
VendorOption = Annotated[
    Literal["auto", "amd", "nvidia", "cpu"],
    typer.Option("--vendor", help="Vendor of the GPU, for the settings; auto: of this machine's."),
]
NoToolOption = Annotated[
    bool, typer.Option("--no-tool", help="Only set variables; no debug agent or compute-sanitizer.")
]
CachingOption = Annotated[
    bool,
    typer.Option("--caching", help="Keep torch's memory caching, which graph capture needs; fewer faults are found."),
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Stop the program after this time.")
]
LogOption = Annotated[
    list[Path] | None,
    file_option("--log", help="Read a log that was recorded elsewhere, and run nothing; repeatable."),
]


def fault(
    program: ProgramArgument = None,
    out: OutOption = Path("fault"),
    vendor: VendorOption = "auto",
    no_tool: NoToolOption = False,
    caching: CachingOption = False,
    timeout: TimeoutOption = None,
    logs: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Run a program with serialised launches and without memory caching, and name the kernel that faults.

    On AMD it runs under ROCm's debug agent, on NVIDIA under compute-sanitizer, if installed. What the program prints
    goes to stderr, and it reads no input. The exit status is 1 where the program failed or a fault was found,
    and 0 after --log.
    """
    if bool(program) == bool(logs):
        raise typer.BadParameter("give a program to run, or --log FILE", param_hint="COMMAND")
    if logs:
        _read(logs, json)
        return
    from accelpatch.checkpoints import target
    from accelpatch.doctor import fault as running

    target.check_folder(out)
    target.check_empty(out)
    whose = _vendor() if vendor == "auto" else vendor
    if whose == "cpu":
        console.note("no GPU that torch can use is here: the program runs with Python's fault handler alone")
    found = running.run(program or [], whose, out, caching=caching, tools=not no_tool, seconds=timeout, show=_show)
    console.print_result(json, found.to_dict(), _lines(found))
    for line in found.notes:
        console.warning(line)
    if found.failed:
        raise typer.Exit(1)


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _vendor() -> str:
    found = [one["vendor"] for one in facts.torch_facts().get("devices", []) if one["vendor"] != "cpu"]
    return str(found[0]) if found else "cpu"


def _read(logs: list[Path], json: bool) -> None:
    from accelpatch.doctor import fault_logs

    found = []
    for log in logs:
        with log.open(errors="replace") as stream:
            found += fault_logs.read(fault_logs.lines(stream))
    lines = [line for place, one in enumerate(found) for line in _fault_lines(one, place)]
    console.print_result(json, [one.to_dict() for one in found], lines or [("no fault", "is known by these logs")])


def _lines(found: Found) -> list[tuple[str, str]]:
    lines = [line for place, one in enumerate(found.faults[:8]) for line in _fault_lines(one, place)]
    if not found.faults:
        lines.append(("no fault", "of the GPU was seen"))
    if len(found.faults) > 8:
        lines.append(("more", f"{len(found.faults) - 8} other faults, which --json lists"))
    lines.append(("program", _status(found.status)))
    lines.append(("run with", " ".join(f"{name}={shlex.quote(text)}" for name, text in found.variables.items())))
    lines.append(("tool", found.tool or "none"))
    names = [f"{one} ({one.stat().st_size} bytes)" for one in found.code[:16]]
    more = [f"and {len(found.code) - 16} more"] if len(found.code) > 16 else []
    lines.append(("code objects", "\n".join([*names, *more]) or "none"))
    lines.append(("logs", str(found.folder)))
    return lines


def _status(status: int | None) -> str:
    if status is None:
        return "did not end in time"
    if status >= 0:
        return f"ended with status {status}"
    names = {one.value: one.name for one in signal.Signals}
    return f"ended by {names.get(-status, f'signal {-status}')}"


def _fault_lines(one: Fault, place: int) -> list[tuple[str, str]]:
    pairs = [
        ("fault", one.kind + (f", {one.count} times" if one.count > 1 else "")),
        ("kernel", one.kernel or "not named by this log"),
        ("source", one.source or "not known: compile with -ggdb (hipcc) or -lineinfo (nvcc)"),
        ("instruction", one.instruction),
        ("address", one.address),
        ("threads", one.threads),
        ("code object", one.code_object),
        ("launch", "\n".join(one.launch) or "not known"),
        ("by", one.tool),
    ]
    gap = [("", "")] if place else []
    return gap + [(name, text) for name, text in pairs if text]
