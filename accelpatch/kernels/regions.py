"""Names what runs: a recorder is notified of each operation, layer and part of a model as it begins and ends.

`accelpatch.profiling` sets a recorder while it records a trace, so that kernels get the names of the operation and the
layer that launched them. Otherwise `recorder` is None, and a region costs one test of it. It is one for the process: a
profile is of everything that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

from accelpatch.kernels.spec import Spec

P = ParamSpec("P")
R = TypeVar("R")
NOTHING: AbstractContextManager[None] = nullcontext()


class Recorder(Protocol):
    """What is notified. Each returned context manager is the time of a region; regions lie within each other."""

    def operation(self, op: str, spec: Callable[..., Spec], args: Sequence[Any]) -> AbstractContextManager[None]:
        """An operation of `dispatch.TABLE`."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """A part of a model: "layer 3", "embedding", "head"."""

    def program(self) -> AbstractContextManager[None]:
        """A program that is captured next: the same kernels in the same order as in the graph that it becomes."""


recorder: Recorder | None = None


def run(
    to: Recorder, op: str, spec: Callable[..., Spec], args: Sequence[Any], implementation: Callable[..., R]
) -> R:  # fmt: skip
    """What the implementation returns for the arguments, as a region of the operation."""
    with to.operation(op, spec, args):
        return implementation(*args)


def layer(place: int) -> AbstractContextManager[None]:
    """The region of the decoder layer at `place`."""
    return NOTHING if recorder is None else recorder.part(f"layer {place}")


def within(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: calls of the function are the part `name` of a model."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if recorder is None:
                return function(*args, **kwargs)
            with recorder.part(name):
                return function(*args, **kwargs)

        return call

    return decorate


def program() -> AbstractContextManager[None]:
    """The region of a program that is captured next."""
    return NOTHING if recorder is None else recorder.program()
