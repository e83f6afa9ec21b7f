"""Implementations that `accelpatch tune kernels` found faster on this machine than choice.TABLE's, shape by shape.

They lie in the user's cache folder, by device and by the releases of torch, Triton and accelpatch: another release, or
another device, finds nothing there.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from accelpatch import cache
from accelpatch.device import Device
from accelpatch.errors import CacheError, KernelError
from accelpatch.kernels import choice
from accelpatch.kernels.spec import Spec

KIND, FILE = "kernels-tuned", "faster.json"
NEAR = 1.5  # rows up to so many times more or fewer than the measured ones run as those do


@dataclass(frozen=True)
class Faster:
    """A call for which another implementation was faster. key: of the call without its rows; rows: of x. gain: the time
    of the default over its own."""

    key: str
    rows: int
    name: str
    gain: float


def key_of(device: Device) -> str:
    """The name of a device's entry in the cache."""
    releases = "-".join(f"{name}{_version(name)}" for name in ("torch", "triton", "accelpatch"))
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", f"{device.arch}-{device.name}-{releases}")[:200]


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from a folder, or there is no Triton
        return "0"


def call_key(spec: Spec) -> str:
    """All of a Spec but its rows, as text."""
    rows = choice.rows_of(spec.op)
    sizes = {name: size for name, size in spec.sizes.items() if name != rows}
    facts: list[Any] = [spec.op, sizes, spec.dtype, spec.scale_dtype, spec.group_size, spec.offset]
    return " ".join(str(one) for one in (*facts, sorted(spec.options.items(), key=str)))


def store(device: Device, found: Sequence[Faster], tried: Sequence[tuple[str, int]]) -> Path:
    """Store what was found, in the place of all that was known of the (key, rows) that were tried."""
    gone = set(tried)
    try:
        kept = [one for one in known(device) if (one.key, one.rows) not in gone]
    except KernelError:
        kept = []
    text = json.dumps([asdict(one) for one in (*kept, *found)], indent=1)
    cache.remove(KIND, key_of(device))
    folder = cache.publish(KIND, key_of(device), lambda folder: _write(folder, text))
    forget()
    return folder / FILE


def _write(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text, encoding="utf-8")


def forget() -> None:
    """Read the cache folder again."""
    known.cache_clear()
    _by_key.cache_clear()


@functools.cache
def known(device: Device) -> tuple[Faster, ...]:
    """What was found on a device; () where nothing was. Raises KernelError for a damaged file."""
    try:
        folder = cache.entry(KIND, key_of(device))
    except CacheError:  # no folder of the user's own: then nothing was stored
        return ()
    if folder is None:
        return ()
    try:
        return tuple(Faster(**one) for one in json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise KernelError(
            f"{folder / FILE} is damaged ({error}): run `accelpatch tune kernels` again, or "
            f"`accelpatch cache clear {KIND}`"
        ) from error


@functools.cache
def _by_key(device: Device) -> dict[str, list[Faster]]:
    found: dict[str, list[Faster]] = {}
    for one in known(device):
        found.setdefault(one.key, []).append(one)
    return found


def preferred(spec: Spec, device: Device) -> tuple[str, ...]:
    """The implementation that was faster for a call with about so many rows; () where none was."""
    if not (every := _by_key(device)) or not (alike := every.get(call_key(spec))):
        return ()
    rows = max(1, spec.sizes.get(choice.rows_of(spec.op), 1))
    best = min(alike, key=lambda one: abs(math.log(one.rows / rows)))
    return (best.name,) if max(best.rows / rows, rows / best.rows) <= NEAR else ()
