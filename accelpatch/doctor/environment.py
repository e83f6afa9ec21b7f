"""What of the settings is set, what is advised for a device, and shell lines that set and unset it.

No process can change its parent's variables, so nothing here does: ``exports`` and ``undoes`` are lines for the user's
shell. ``ACCELPATCH_ENV_SET``, which the lines of `exports` keep, lists what they set: NAME=VALUE, separated by ``;``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import settings
from .settings import CORES, SETTINGS, SYSTEM, Advice, Setting

#: what is set by lines of `exports` in this shell
KEPT = "ACCELPATCH_ENV_SET"
#: what the table's values are made of, so that a line of a shell needs no quotes
SAFE = re.compile(r"[A-Za-z0-9_.:,/-]*")
NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Row:
    """One setting on this machine. value: what is set, None for nothing. advised: None where there is no advice, UNSET
    for "leave it out". by_us: set by lines of `exports`. topic, why: of the advice."""

    name: str
    value: str | None
    does: str
    source: str
    advised: str | None = None
    why: str = ""
    topic: str = ""
    by_us: bool = False

    @property
    def follows(self) -> bool:
        """Whether the value is the advised one, or there is no advice."""
        return self.advised is None or (self.value or "") == self.advised

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"follows": self.follows}


def rows(
    vendor: str, arch: str, topics: Sequence[str] = ("speed",), variables: Mapping[str, str] = os.environ
) -> list[Row]:
    """The settings that concern a device, in the table's order. vendor: "amd", "nvidia" or "cpu". arch: "gfx942",
    "sm_90", ... An advice of another topic than `topics` is left out."""
    ours = kept(variables)
    found = []
    for one in SETTINGS:
        if vendor not in one.devices:
            continue
        advice = _advice(one, vendor, arch, topics)
        value = variables.get(one.name)
        row = Row(one.name, value, one.does, one.source, by_us=one.name in ours and ours[one.name] == value)
        if advice is not None:
            text = str(cores()) if advice.value == CORES else advice.value
            row = Row(row.name, value, row.does, row.source, text, advice.why, advice.topic, row.by_us)
        found.append(row)
    return found


def _advice(setting: Setting, vendor: str, arch: str, topics: Sequence[str]) -> Advice | None:
    wanted = [one for one in setting.advice if one.topic in topics]
    return next((one for one in wanted if arch in one.where or vendor in one.where), None)


def system_rows(vendor: str, topics: Sequence[str] = ("speed",), root: Path = Path("/")) -> list[dict[str, str | None]]:
    """What belongs to the whole machine, with its value (None where it cannot be read) and the commands that set and
    undo it. They are shown, and run by nobody here."""
    found = []
    for one in SYSTEM:
        if vendor not in one.devices or one.topic not in topics:
            continue
        value = None
        if one.file:
            with contextlib.suppress(OSError):
                value = root.joinpath(one.file.lstrip("/")).read_text().strip()
        found.append({**asdict(one), "value": value})
    return found


def exports(found: Sequence[Row]) -> list[str]:
    """POSIX shell lines that set what is advised where nothing is set. A value of the user's own stays. `undoes` takes
    back what they set and nothing else."""
    lines = [f'{KEPT}="${{{KEPT}-}}"']
    for row in found:
        if row.advised:
            _check(row.name, row.advised)
            lines.append(
                f'[ -n "${{{row.name}+set}}" ] || {{ export {row.name}={row.advised}; '
                f'{KEPT}="${{{KEPT}}}{row.name}={row.advised};"; }}'
            )
    return [*lines, f"export {KEPT}"]


def undoes(variables: Mapping[str, str] = os.environ) -> list[str]:
    """POSIX shell lines that unset what lines of `exports` set in this shell, if it still has that value."""
    ours = kept(variables)
    lines = [f"unset {name}" for name, value in ours.items() if variables.get(name) == value]
    return [*lines, f"unset {KEPT}"] if KEPT in variables else []


def changed(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Names of what lines of `exports` set and somebody changed since; `undoes` leaves them."""
    return [name for name, value in kept(variables).items() if variables.get(name) != value]


def kept(variables: Mapping[str, str]) -> dict[str, str]:
    """Name -> value of what lines of `exports` set. What is no name of the table is ignored: the variable is text that
    anybody can have written, and lines for a shell are made of it."""
    known = {one.name for one in SETTINGS}
    pairs = [text.partition("=") for text in variables.get(KEPT, "").split(";")]
    return {name: value for name, _, value in pairs if name in known and SAFE.fullmatch(value)}


def _check(name: str, value: str) -> None:
    if not NAME.fullmatch(name) or not SAFE.fullmatch(value):
        raise ValueError(f"{name}={value} is not made of the characters that need no quotes")


def cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use: those of its affinity, at most a container's quota, at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        text = str(cpu)
        with contextlib.suppress(OSError):
            text = file.read_text().strip()
        siblings.add(text)
    return max(1, min(len(siblings), quota(root) or len(siblings)))


def quota(root: Path = Path("/")) -> int | None:
    """CPUs of this container's quota, rounded down to at least 1 (control groups, version 2); None without one."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = root.joinpath("sys/fs/cgroup/cpu.max").read_text().split()
        if limit != "max":
            return max(1, int(limit) // int(period))
    return None


def affinity(root: Path = Path("/")) -> str:
    """On how many CPUs and NUMA nodes this process may run, in words."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    nodes = len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or 1
    words = f"{allowed} of {os.cpu_count()} CPUs, {cores(root)} cores to use, {nodes} NUMA node{'s' * (nodes != 1)}"
    limit = quota(root)
    words += f", a quota of {limit} CPUs" if limit else ""
    if nodes > 1:
        words += "; a model that fits one node decodes faster there: numactl --cpunodebind=0 --membind=0 PROGRAM"
    return words


def check_topics(topics: Sequence[str]) -> None:
    """Raise ValueError for a topic that is not in settings.TOPICS."""
    for topic in topics:
        if topic not in settings.TOPICS:
            raise ValueError(f"{topic!r} is no topic; there are: {', '.join(settings.TOPICS)}")
