"""Every operation that runs within a context, held against its reference by the float rule of parity.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels import parity
from accelpatch.kernels.dispatch import Result, observed

# Operations whose rows are independent: for calls with one weight the float64 reference is computed once for all rows,
# since its time goes into dequantising. The first argument is x[..., K], the others are the weight's. The yardstick,
# torch in the same precision, stays each call's own: it too rounds one row otherwise than many.
BY_ROWS = frozenset({"int8_linear", "int4_linear"})
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
        for (op, args, outputs), exact in zip(calls, exact_results(calls), strict=True):
            figures.extend((c.error, c.bound) for c in parity.check(op, args, outputs, exact))


def by_weight(seen: Sequence[Seen]) -> list[list[Seen]]:
    """The calls, those of BY_ROWS with the same weight and dtype together, every other one alone."""
    groups: dict[tuple[Any, ...], list[Seen]] = {}
    for place, call in enumerate(seen):
        op, args, _ = call
        key = (op, args[0].dtype, *map(id, args[1:])) if op in BY_ROWS else (place,)
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def exact_results(calls: Sequence[Seen]) -> list[tuple[Tensor, ...]]:
    """The float64 reference of each call of a group."""
    op, args, _ = calls[0]
    if len(calls) == 1:
        return [parity.exact(op, args)]
    inputs = [call[1][0] for call in calls]
    rows = [x.reshape(-1, x.shape[-1]) for x in inputs]
    (joined,) = parity.exact(op, (torch.cat(rows), *args[1:]))
    parts = joined.split([len(part) for part in rows])
    return [(part.reshape(*x.shape[:-1], -1),) for part, x in zip(parts, inputs, strict=True)]
