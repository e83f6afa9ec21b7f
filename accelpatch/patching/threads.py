"""Limits torch's threads during verification on a CPU that other processes use too.

Verification runs thousands of small operations. If one thread of torch's pool waits for a core that another process
uses, an operation may take some 10 ms instead of 30 us, since the other threads spin until that one is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUSY = 0.5  # fraction of the cores that other processes may use before threads are reduced


def fitting(threads: int, load: float, cores: int) -> int:
    """The number of `threads` for which idle cores are left. load: the system's load average."""
    busy = min(load / cores, 1.0)
    return threads if busy <= BUSY else max(1, int(threads * (1 - busy)))


@contextmanager
def for_idle_cores(kind: str) -> Iterator[None]:
    """Context manager in which torch uses no more threads than cores are idle, if `kind` (of a Device) is "cpu"."""
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(fitting(threads, os.getloadavg()[0], os.cpu_count() or 1))
    try:
        yield
    finally:
        if kind == "cpu":
            torch.set_num_threads(threads)
