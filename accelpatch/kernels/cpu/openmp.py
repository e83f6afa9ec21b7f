"""torch's OpenMP runtime in this process; the native kernels share its threads."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

LIBRARIES = ("libgomp", "libiomp5", "libomp")
TEAM = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime of this process; None where there is none, or more than one."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if line.count("/")}
    loaded = [path for path in paths if Path(path).name.startswith(LIBRARIES)]
    return ctypes.CDLL(loaded[0]) if len(loaded) == 1 else None


def alone_after_fork() -> None:
    """Make forked children compute on one thread: OpenMP's do not survive a fork, and torch would wait for ever."""
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def team() -> tuple[int | None, ...]:
    """Addresses of the functions in TEAM; all None where there is no such runtime."""
    library = openmp()
    if library is None or not all(hasattr(library, name) for name in TEAM):
        return (None,) * len(TEAM)
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in TEAM)
