"""Every operation that runs within a context, held against its reference by the float rule of parity.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelpatch.kernels import parity
from accelpatch.kernels.dispatch import Result, observed


@contextmanager
def checked() -> Iterator[list[tuple[float, float]]]:
    """The list fills with (error, bound) for each output of each operation; an error over its bound breaks the rule."""
    figures: list[tuple[float, float]] = []

    def observer(op: str, args: Sequence[Any], result: Result) -> None:
        figures.extend((c.error, c.bound) for c in parity.check(op, args, parity.as_tuple(result)))

    with observed(observer):
        yield figures
