"""Keeping torch's own threads out of the way between native steps.

torch splits even an argmax over the vocabulary among OpenMP threads, which then spin for milliseconds on the cores
that the next native step needs. While a generation loop runs, the calling thread alone is limited to one thread, and
gets all of them back for every step and every prompt; no other thread is touched. Where torch uses no OpenMP that can
be found, nothing is done.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accelpatch.kernels.openmp import openmp


class _Local(threading.local):
    full: int | None = None  # threads that the thread had before; None outside of a loop


_local = _Local()


def _content_with_one() -> None:
    """The child of a fork has no other OpenMP threads (kernels/openmp.py), in a loop that was under way too."""
    if _local.full is not None:
        _local.full = 1


@functools.cache
def _after_forks() -> None:
    os.register_at_fork(after_in_child=_content_with_one)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch's operations run on the calling thread alone."""
    library = openmp()
    if library is None or _local.full is not None:
        yield
        return
    _after_forks()
    torch.get_num_threads()  # a thread takes over torch's setting when it first asks
    _local.full = int(library.omp_get_max_threads())
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(_local.full)
        _local.full = None


@contextmanager
def all_threads() -> Iterator[None]:
    """Within it, inside `one_thread`, torch has the threads back that it had."""
    library, full = openmp(), _local.full
    if library is None or full is None:
        yield
        return
    library.omp_set_num_threads(full)
    try:
        yield
    finally:
        library.omp_set_num_threads(1)
