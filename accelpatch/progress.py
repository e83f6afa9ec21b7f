"""Progress bars on stderr: of tqdm, in a terminal and in a notebook; none in a log, or where progress=False."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelpatch.errors import ArgumentError

Progress = Callable[[str, int, int], None]
DELAY = 0.3  # seconds before a bar appears


def quiet(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


@contextmanager
def bars() -> Iterator[Progress]:
    """Context manager: yields a ``progress(stage, done, total)`` that draws one bar for each stage, gone when done."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    drawn: dict[str, Any] = {}

    def advance(stage: str, done: int, total: int) -> None:
        bar = drawn.get(stage)
        if bar is None or done < bar.n:
            # disable=None: where stderr is no terminal
            bar = drawn[stage] = tqdm(desc=stage, total=total or None, leave=False, delay=DELAY, disable=None)
        bar.total = total or None
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    try:
        yield advance
    finally:
        for bar in drawn.values():
            bar.close()


@contextmanager
def shown(progress: Progress | bool | None) -> Iterator[Progress]:
    """Context manager: yields what a public function reports to. progress: the user's own function; False: nothing is
    shown; None or True: `bars`, unless transformers shows none either. Raises ArgumentError for anything else."""
    from transformers.utils import logging

    if callable(progress):
        yield progress
    elif progress is not None and not isinstance(progress, bool):
        raise ArgumentError(f"progress is {progress!r}; it is a function of (stage, done, total), True or False")
    elif progress is False or not logging.is_progress_bar_enabled():  # as `disable_progress_bar` there says
        yield quiet
    else:
        with bars() as advance:
            yield advance


class Stopwatch:
    """Forwards progress calls and adds up the seconds that each stage takes."""

    def __init__(self, progress: Progress | None):
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._last = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        if self._progress is not None:
            self._progress(stage, done, total)


class Reports:
    """Passes progress on. broken: whether the caller's function raised, which says nothing of the model."""

    def __init__(self, progress: Progress):
        self.broken, self._progress = False, progress

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.broken = True
        self._progress(stage, done, total)
        self.broken = False
