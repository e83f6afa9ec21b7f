"""Every operation that runs within a context, held against its reference by the float rule of parity.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import parity
from accelpatch.kernels.dispatch import Result, kernel, observed

Seen = tuple[str, tuple[Any, ...], tuple[Tensor, ...]]


@contextmanager
def checked() -> Iterator[list[tuple[float, float]]]:
    """The list fills, at the end, with (error, bound) for each output; an error over its bound breaks the rule."""
    figures: list[tuple[float, float]] = []
    seen: list[Seen] = []

    def observer(op: str, args: Sequence[Any], result: Result) -> None:
        seen.append((op, tuple(args), parity.as_tuple(result)))

    with observed(observer):
        yield figures
    for calls in by_weight(seen):
        figures.extend((c.error, c.bound) for c in judged(calls))


def by_weight(seen: Sequence[Seen]) -> list[list[Seen]]:
    """The calls, those of a product with the same weight and dtype together, every other one alone."""
    groups: dict[tuple[Any, ...], list[Seen]] = {}
    for place, call in enumerate(seen):
        op, args, _ = call
        weight = tuple(id(value) if isinstance(value, Tensor) else value for value in args[1:])
        key = (op, args[0].dtype, *weight) if kernel(op).dense else (place,)
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def judged(calls: Sequence[Seen]) -> list[parity.Comparison]:
    """The calls of a group against their reference; a product's weight is dequantised once for all of them."""
    op, args, outputs = calls[0]
    dense = kernel(op).dense
    if dense is None:
        return parity.check(op, args, outputs)
    exact, plain = dense(torch.float64, *args[1:]), dense(args[0].dtype, *args[1:])
    found = []
    for _, (x, *_), (y,) in calls:
        due = functional.linear(x.double(), *exact)
        found.append(parity.compare(y, due, parity.torch_error(functional.linear(x, *plain), due)))
    return found
