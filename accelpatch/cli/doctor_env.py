"""``accelpatch doctor env``: the settings of the environment that matter, and shell lines that set and undo them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelpatch.errors import AccelpatchError

from . import console, facts
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.doctor.environment import Row

KIND, KEY, FILE = "environment", "advised", "env.sh"  # cache entry and name of the file with the exports
SET_HELP = "Write the advised exports to a file in the cache folder, and print the line that sources it."
RESET_HELP = "Remove that file, and print the lines that undo in this shell what it set."
TopicOption = Annotated[
    list[str] | None,
    typer.Option(
        "--for", metavar="TOPIC",
        help="Advise for speed (the default), memory, determinism, parallel, tuning, affinity or convolution; "
        "repeatable.",
    ),
]  # fmt: skip
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="ARCH", help="Advise for another GPU, such as gfx942; or for cpu.")
]


def env(
    write: Annotated[bool, typer.Option("--set", help=SET_HELP)] = False,
    reset: Annotated[bool, typer.Option("--reset", help=RESET_HELP)] = False,
    shell: Annotated[bool, typer.Option("--shell", help="Print the advised exports, and write nothing.")] = False,
    topics: TopicOption = None,
    arch: ArchOption = None,
    json: JsonOption = False,
) -> None:
    """Show which settings of the environment matter for this device: what is set, what it does, what is advised, why.

    Nothing is changed: a program cannot set its caller's variables. In a shell, eval "$(accelpatch doctor env --set)"
    sets what is advised, and eval "$(accelpatch doctor env --reset)" undoes exactly that.
    """
    from accelpatch.doctor import environment

    if write + reset + shell > 1 or (json and (write or reset or shell)):
        raise typer.BadParameter("give one of --set, --reset, --shell and --json", param_hint="--set")
    wanted = topics or ["speed"]
    try:
        environment.check_topics(wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None
    if reset:
        _reset()
        return
    name, vendor, at = _device(arch)
    rows = environment.rows(vendor, at, wanted)
    if write or shell:
        _set(rows, write)
        return
    system = environment.system_rows(vendor, wanted)
    document = {
        "device": name, "vendor": vendor, "arch": at, "topics": wanted, "affinity": environment.affinity(),
        "settings": [row.to_dict() for row in rows], "system": system,
    }  # fmt: skip
    console.print_result(json, document, _lines(document, rows, system))


def _device(arch: str | None) -> tuple[str, str, str]:
    """Name, vendor and arch: of a GPU of the given arch; without one of this machine's first GPU, else of the CPU."""
    from accelpatch import device

    if arch == "cpu":
        return "the CPU", "cpu", ""
    if arch is not None:
        known = device.facts_of(arch)
        if known is None:
            raise AccelpatchError(device.unknown(arch))
        return known.card or arch, known.vendor, arch
    found = facts.torch_facts().get("devices", [])
    gpus = [one for one in found if one["vendor"] != "cpu"] or found
    if not gpus:
        return "the CPU", "cpu", ""
    return gpus[0]["name"], gpus[0]["vendor"], gpus[0]["arch"]


def _set(rows: list[Row], write: bool) -> None:
    from accelpatch import cache
    from accelpatch.doctor import environment

    lines = environment.exports(rows)
    for row in rows:
        if row.advised is not None and row.value is not None and not row.follows:
            words = row.advised or "nothing"
            console.note(f"{row.name} stays {row.value!r}, as you set it; advised is {words}: {row.why}")
    if not write:
        print("\n".join(lines))
        return
    cache.remove(KIND, KEY)
    folder = cache.publish(KIND, KEY, lambda partial: _write(partial / FILE, lines))
    print(f". {shlex.quote(str(folder / FILE))}")
    console.note("nothing is set yet: run that line in your shell (bash: source), or put it into your shell's profile")


def _write(file: Path, lines: list[str]) -> None:
    head = "# Written by `accelpatch doctor env --set`; `accelpatch doctor env --reset` removes it."
    file.write_text("\n".join([head, *lines]) + "\n")


def _reset() -> None:
    from accelpatch import cache
    from accelpatch.doctor import environment

    freed = cache.remove(KIND, KEY)
    lines = environment.undoes()
    if lines:
        print("\n".join(lines))
    for name in environment.changed():
        console.note(f"{name} stays: it was changed after it had been set")
    console.note(
        "the file is removed; take its line out of your shell's profile too"
        if freed
        else "there is no file of `accelpatch doctor env --set`"
    )
    console.note(
        'run these lines, or eval "$(accelpatch doctor env --reset)"'
        if lines
        else "nothing that it sets is set in this shell"
    )


def _lines(document: dict[str, Any], rows: list[Row], system: list[dict[str, str | None]]) -> list[tuple[str, str]]:
    arch = f" ({document['arch']})" if document["arch"] else ""
    lines = [("device", f"{document['device']}{arch}"), ("affinity", document["affinity"])]
    for row in rows:
        state = "not set" if row.value is None else f"{row.value!r}" + (" by `doctor env`" if row.by_us else "")
        advice = "" if row.advised is None else f"advised: {row.advised or 'leave it out'}: {row.why}"
        mark = "" if row.follows else "! "
        lines.append((f"{mark}{row.name}", "\n".join(filter(None, (state, row.does, advice)))))
    for one in system:
        state = "of the machine" if one["value"] is None else f"{one['value']}, of the machine"
        advice = f"advised: {one['advised']}: {one['why']}"
        mark = "" if one["value"] == one["advised"] else "! "
        commands = f"set by {one['set_by']}\nundone by {one['undone_by']}"
        lines.append((f"{mark}{one['name']}", "\n".join((state, str(one["does"]), advice, commands))))
    differ = sum(not row.follows for row in rows)
    lines.append(("", f"variables that differ from what is advised: {differ}; topics: {', '.join(document['topics'])}"))
    return lines
