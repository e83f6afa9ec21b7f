"""Orders of attention's implementations that `accelpatch tune attention` measured on this machine.

They lie in the user's cache folder, by device and by the release of torch, whose kernels they are about.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from accelpatch import cache
from accelpatch.device import Device
from accelpatch.errors import CacheError, KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Spec

KIND, FILE = "attention", "orders.json"


@dataclass(frozen=True)
class Order:
    """The implementations that ran a shape, the fastest first. length: of queries and keys; dtype: torch's name."""

    dtype: str
    size: int
    length: int
    causal: bool
    names: tuple[str, ...]


def key_of(device: Device) -> str:
    """The name of a device's entry in the cache."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", f"{device.arch}-{device.name}-torch{torch.__version__}")[:200]


def store(device: Device, orders: Sequence[Order]) -> Path:
    """Store a device's orders, in the place of former ones of the same dtypes and head sizes, and of a damaged file."""
    new = {(one.dtype, one.size) for one in orders}
    try:
        kept = [one for one in orders_of(device) if (one.dtype, one.size) not in new]
    except KernelError:
        kept = []
    text = json.dumps([asdict(one) for one in (*kept, *orders)], indent=1)
    cache.remove(KIND, key_of(device))

    def write(folder: Path) -> None:
        (folder / FILE).write_text(text)

    folder = cache.publish(KIND, key_of(device), write)
    orders_of.cache_clear()
    dispatch.forget()
    return folder / FILE


@functools.cache
def orders_of(device: Device) -> tuple[Order, ...]:
    """What was measured on a device; () where nothing was. Raises KernelError for a damaged file."""
    try:
        folder = cache.entry(KIND, key_of(device))
    except CacheError:  # no folder of the user's own: then nothing was stored
        return ()
    if folder is None:
        return ()
    try:
        found = [Order(**(one | {"names": tuple(one["names"])})) for one in json.loads((folder / FILE).read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KernelError(
            f"{folder / FILE} is damaged ({error}): run `accelpatch tune attention` again, or "
            f"`accelpatch cache clear {KIND}`"
        ) from error
    return tuple(found)


def preferred(spec: Spec, device: Device) -> tuple[str, ...]:
    """The measured order for a call: of its dtype, head size and causality that of the nearest length; () for none."""
    dtype = str(spec.dtype).removeprefix("torch.")
    wanted = (dtype, spec.sizes["D"], bool(spec.options["causal"]))
    alike = [one for one in orders_of(device) if (one.dtype, one.size, one.causal) == wanted]
    length = max(1, spec.sizes["L"])
    if not alike or length * 8 < min(one.length for one in alike):  # of a decode step nothing was measured
        return ()
    return min(alike, key=lambda one: abs(math.log(one.length / length))).names
