"""From how many rows of x on torch's product beats the native one: measured once a machine and kept in the cache.

The native product reads a packed weight as it is. torch's wants it as floats, a block of rows at a time, which many
rows of x pay for; on a machine without wide integer instructions it is then the faster one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from accelpatch import cache
from accelpatch.device import probe
from accelpatch.errors import CacheError
from accelpatch.kernels import cpu_native, cpu_pack
from accelpatch.kernels.cpu_native import PLAIN
from accelpatch.kernels.cpu_pack import Pack

KIND, FILE = "measured", "crossover.json"
ROWS = (16, 32, 64, 96, 128, 256)
NEVER = 1 << 40
REPEATS = 5
N, K, GROUPS = 1024, 1024, (32, 64, 128)
CLEARLY = 0.9  # torch's time as a share of the native one: below it the difference is no noise
VERSION = 2  # of the two products: what older ones took is measured anew

Product = Callable[[Tensor, Pack], Tensor]


def rows(kind: int, group: int, by_torch: Product) -> int:
    """The fewest rows from which on `by_torch` is clearly faster than the native product of a weight of this kind.

    group: how many k share a scale; with small groups the native product does more beside its multiplications.
    """
    nearest = max(one for one in GROUPS if one <= max(group, GROUPS[0]))
    return _rows(kind, nearest, cpu_native.isa(), cpu_native.threads(), by_torch)


@functools.cache
def _rows(kind: int, group: int, isa: str, threads: int, by_torch: Product) -> int:
    facts = [probe("cpu").name, isa, threads, torch.__version__, (N, K, group), ROWS, VERSION]
    key = f"crossover-{isa}-{kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    try:
        stored = cache.publish(KIND, key, lambda folder: _write(folder, measure(kind, group, by_torch)))
        return int(json.loads((stored / FILE).read_text())["rows"])
    except (CacheError, OSError, ValueError, KeyError, TypeError):  # a cache that cannot be used costs a measurement
        return measure(kind, group, by_torch)


def _write(folder: Path, found: int) -> None:
    (folder / FILE).write_text(json.dumps({"rows": found}))


def measure(kind: int, group: int, by_torch: Product) -> int:
    """Time both products; some tens of milliseconds."""
    q = torch.zeros(N, K // (1 if kind == cpu_native.INT8 else 2), dtype=torch.int8, device="cpu")
    scale = torch.ones(N, K // group, **PLAIN)
    pack = cpu_pack.pack_int8(q, scale) if kind == cpu_native.INT8 else cpu_pack.pack_int4(q, scale, scale)
    found = NEVER
    for count in reversed(ROWS):
        x = torch.ones(count, K, **PLAIN)
        native, other = _seconds(cpu_pack.linear, x, pack), _seconds(by_torch, x, pack)
        if other > CLEARLY * native:
            return found
        found = count
    return found


def _seconds(product: Product, x: Tensor, pack: Pack) -> float:
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        product(x, pack)
        taken.append(time.perf_counter() - begun)
    return min(taken)
