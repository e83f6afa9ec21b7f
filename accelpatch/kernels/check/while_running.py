"""Checks every operation that runs within a context against its reference by the float rule (parity.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.check import parity
from accelpatch.kernels.dispatch import kernel, observed
from accelpatch.kernels.spec import Result

Seen = tuple[str, tuple[Any, ...], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Part:
    """What of linear layers is compared: at most so many `rows` of each input, evenly spread, with every so many-th
    block of the weight's rows (`every`), from block `first` on."""

    rows: int
    every: int = 1
    first: int = 0


@contextmanager
def checked(rows: int | None = None, every: int = 1, first: int = 0) -> Iterator[list[tuple[float, float]]]:
    """Context manager: fills the yielded list, at its end, with (error, bound) for each output of each operation.

    rows, every, first: a Part of linear layers; without rows, all of them.
    """
    part = None if rows is None else Part(rows, every, first)
    figures: list[tuple[float, float]] = []
    seen: list[Seen] = []

    def observer(op: str, args: Sequence[Any], result: Result) -> None:
        seen.append((op, tuple(args), parity.as_tuple(result)))

    with observed(observer):
        yield figures
    results = [result for calls in by_weight(seen) for result in against_references(calls, part)]
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


def against_references(calls: Sequence[Seen], part: Part | None = None) -> list[parity.Result]:
    """Outputs of a group's calls with their references; the weight of a linear layer is dequantised once for all."""
    op, args, outputs = calls[0]
    blocks = kernel(op).blocks
    if blocks is None:
        return parity.against_references(op, args, outputs)
    inputs = [_spread(call_args[0], part) for _, call_args, _ in calls]
    rows = torch.cat(inputs)  # one pass over the weight for all calls
    wide, exact, plain = rows.double(), list[Tensor](), list[Tensor]()
    compared = _some(list(blocks(*args[1:])), part)
    for _, make in compared:
        weight, bias = make()
        exact.append(functional.linear(wide, weight, bias))
        plain.append(functional.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)))
    made = [_spread(y, part) for _, _, (y,) in calls]
    if part is not None:
        made = [torch.cat([y[:, columns] for columns, _ in compared], 1) for y in made]
    both = (torch.cat(parts, 1).split([len(x) for x in inputs]) for parts in (exact, plain))
    return list(zip(made, *both, strict=True))


def _spread(x: Tensor, part: Part | None) -> Tensor:
    """x[..., K] as rows [M, K]: those of a part, evenly spread from the first to the last."""
    rows = x.reshape(-1, x.shape[-1])
    if part is None or len(rows) <= part.rows:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, part.rows, device=x.device).round().long()]


def _some(blocks: list[Any], part: Part | None) -> list[Any]:
    return blocks if part is None else blocks[part.first % min(part.every, len(blocks)) :: part.every]
