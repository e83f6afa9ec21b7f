"""Checks every operation that runs within a context against its reference by the float rule (parity.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.check import parity
from accelpatch.kernels.dispatch import kernel, observed
from accelpatch.kernels.spec import Result

Seen = tuple[str, tuple[Any, ...], tuple[Tensor, ...]]


@contextmanager
def checked() -> Iterator[list[tuple[float, float]]]:
    """Context manager: fills the yielded list, at its end, with (error, bound) for each output of each operation."""
    figures: list[tuple[float, float]] = []
    seen: list[Seen] = []

    def observer(op: str, args: Sequence[Any], result: Result) -> None:
        seen.append((op, tuple(args), parity.as_tuple(result)))

    with observed(observer):
        yield figures
    results = [result for calls in by_weight(seen) for result in beside_references(calls)]
    figures.extend((c.error, c.bound) for c in parity.compare_all(results))


def by_weight(seen: Sequence[Seen]) -> list[list[Seen]]:
    """Group the calls: those of linear layers with the same weight and dtype together, each other call alone."""
    groups: dict[tuple[Any, ...], list[Seen]] = {}
    for place, call in enumerate(seen):
        op, args, _ = call
        weight = tuple(id(value) if isinstance(value, Tensor) else value for value in args[1:])
        key = (op, args[0].dtype, *weight) if kernel(op).blocks else (place,)
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def beside_references(calls: Sequence[Seen]) -> list[parity.Result]:
    """Outputs of a group's calls with their references; the weight of a linear layer is dequantised once for all."""
    op, args, outputs = calls[0]
    blocks = kernel(op).blocks
    if blocks is None:
        return parity.beside_references(op, args, outputs)
    inputs = [call_args[0] for _, call_args, _ in calls]
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs])  # one pass over the weight for all calls
    exact, plain, wide = [], [], rows.double()
    for weight, bias in blocks(*args[1:]):
        exact.append(functional.linear(wide, weight, bias))
        plain.append(functional.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)))
    sizes = [x.shape[:-1].numel() for x in inputs]
    both = zip(torch.cat(exact, 1).split(sizes), torch.cat(plain, 1).split(sizes), calls, strict=True)
    return [(y, due.view(y.shape), own.view(y.shape)) for due, own, (_, _, (y,)) in both]
