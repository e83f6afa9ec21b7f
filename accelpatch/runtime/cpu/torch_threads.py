"""Keeps torch's own threads off the cores between native steps.

torch splits even an argmax over the vocabulary among OpenMP threads, which then spin for milliseconds on the cores that
the next native step needs. During a generation loop the calling thread is therefore limited to one thread, and gets all
of them back for every step and prompt. Other threads are not affected. Nothing is done where torch's OpenMP runtime is
not found.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accelpatch.kernels.cpu.openmp import openmp


class _Local(threading.local):
    full: int | None = None  # the calling thread's number of threads before the loop; None outside one


_local = _Local()


def _content_with_one() -> None:
    """After a fork: the child has no other OpenMP threads (kernels/cpu/openmp.py), even inside a running loop."""
    if _local.full is not None:
        _local.full = 1


@functools.cache
def _after_forks() -> None:
    os.register_at_fork(after_in_child=_content_with_one)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch's operations run on the calling thread only."""
    library = openmp()
    if library is None or _local.full is not None:
        yield
        return
    _after_forks()
    torch.get_num_threads()  # a thread adopts torch's global setting when it first asks
    _local.full = int(library.omp_get_max_threads())
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(_local.full)
        _local.full = None


@contextmanager
def all_threads() -> Iterator[None]:
    """Context manager: inside `one_thread`, give torch its threads back."""
    library, full = openmp(), _local.full
    if library is None or full is None:
        yield
        return
    library.omp_set_num_threads(full)
    try:
        yield
    finally:
        library.omp_set_num_threads(1)
