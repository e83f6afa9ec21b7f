"""How many threads verification takes on a CPU that others use too.

It runs thousands of small operations. Where a thread of torch's team waits for a core that another process has, each
of them may take some 10 ms in place of 30 us, since the others spin until it is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUSY = 0.5  # share of the cores that may be taken by others


def fitting(threads: int, load: float, cores: int) -> int:
    """Of so many threads those that find a core of their own. load: the mean number of processes that run or wait."""
    taken = min(load / cores, 1.0)
    return threads if taken <= BUSY else max(1, int(threads * (1 - taken)))


@contextmanager
def for_idle_cores(kind: str) -> Iterator[None]:
    """Context manager in which torch on a CPU takes no more threads than there are idle cores. kind: the device's."""
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(fitting(threads, os.getloadavg()[0], os.cpu_count() or 1))
    try:
        yield
    finally:
        if kind == "cpu":
            torch.set_num_threads(threads)
