"""Says which implementation of an operation runs for how many rows on a device, and why those before it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from accelpatch.device import Device
from accelpatch.kernels import added, choice, dispatch
from accelpatch.kernels.spec import Spec

MOST = 1 << 16  # rows that are asked about


@dataclass(frozen=True)
class Runs:
    """What runs for `least` rows and more. name: None where nothing does. note: of the row of choice.TABLE. refused:
    the implementations before it in the order, and why they cannot."""

    least: int
    name: str | None
    note: str
    refused: tuple[tuple[str, str], ...]


def runs(spec: Spec, device: Device, rows: int) -> Runs:
    """What runs for so many rows of a call."""
    asked = replace(spec, sizes={**spec.sizes, choice.rows_of(spec.op): rows})
    note = choice.row(spec.op, asked, device).note
    refused: list[tuple[str, str]] = []
    for name in dispatch.order(spec.op, asked, device):
        reason = dispatch.why_not(spec.op, name, asked, device)
        if reason is None:
            return Runs(rows, name, "" if name in added.of(spec.op) else note, tuple(refused))
        refused.append((name, reason))
    return Runs(rows, None, note, tuple(refused))


def ranges(spec: Spec, device: Device) -> list[Runs]:
    """What runs for 1 row and more, in order: one for each change of the implementation.

    Between the powers of two and the bounds of choice.TABLE it is found by halving, for one change at most. Queries of
    attention are no more than its keys.
    """
    most = spec.sizes.get("S", MOST)
    bounds = (bound + 1 for row in choice.TABLE[spec.op] for bound in row.rows if bound is not None)
    places = sorted({1 << at for at in range(MOST.bit_length())} | set(bounds) | {most})
    places = [place for place in places if 1 <= place <= most]
    found = [runs(spec, device, places[0])]
    for low, high in pairwise(places):
        there = runs(spec, device, high)
        if there.name != found[-1].name:
            while high - low > 1:
                middle = (low + high) // 2
                at = runs(spec, device, middle)
                low, high, there = (middle, high, there) if at.name == found[-1].name else (low, middle, at)
            found.append(there)
    return found


def table(specs: Sequence[Spec], device: Device) -> str:
    """A line for each operation: rows and the implementation that runs for them; below it the notes and reasons."""
    grouped: dict[tuple[str, tuple[str, ...]], list[Spec]] = {}
    for spec in specs:
        grouped.setdefault((spec.op, tuple(_lines(spec, device))), []).append(spec)
    several = [op for op, _ in grouped]
    lines = [f"which implementation runs for how many rows, on {device.name} ({device.arch}):"]
    for (op, (first, *more)), alike in grouped.items():
        sizes = f" of {_sizes(alike)}" if several.count(op) > 1 else ""
        lines += [f"  {op}{sizes}  {first}", *more]
    return "\n".join(lines if grouped else [])


def _sizes(specs: Sequence[Spec]) -> str:
    """N x K of linear layers, else all sizes but the rows."""
    rows = choice.rows_of(specs[0].op)
    each = ("x".join(str(size) for name, size in spec.sizes.items() if name != rows) for spec in specs)
    return ", ".join(dict.fromkeys(each))


def _lines(spec: Spec, device: Device) -> Iterator[str]:
    found = ranges(spec, device)
    ends = [f"{one.least - 1}" for one in found[1:]]
    bounds = [f"{one.least}-{end}" for one, end in zip(found, [*ends, ""], strict=True)]
    yield "  ".join(f"{rows} {one.name or 'none'}" for rows, one in zip(bounds, found, strict=True))
    for rows, one in zip(bounds, found, strict=True):
        if one.note and not one.refused:
            yield f"    {rows} {one.name}: {one.note}"
        yield from (f"    {rows} not {name}: {reason}" for name, reason in one.refused)
