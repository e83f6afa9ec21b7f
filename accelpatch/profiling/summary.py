"""What a trace comes to: times of a token by kernel, by operation and by layer, gaps, launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from accelpatch.errors import AccelpatchError
from accelpatch.profiling.recorder import LAYER, OUTSIDE
from accelpatch.profiling.trace import Record

UNNAMED = "not named"


@dataclass(frozen=True)
class Row:
    """One line of a table. All are of one token: count, microseconds that it ran, those that it waited for a kernel
    before it. share: of the step."""

    name: str
    count: float
    microseconds: float
    waited: float
    share: float


@dataclass(frozen=True)
class Summary:
    """Of the steps of a trace, each of one token a row. Times are microseconds of a step.

    unprofiled: without any recording. recorded: while it was recorded. busy: in which a kernel ran (GPU), or an
    operation (CPU). named: the share of kernels whose operation or layer is known. one: the records of one step.
    """

    device: str
    steps: int
    unprofiled: float
    recorded: float
    busy: float
    waited: float
    launches: float
    kernels: float
    named: float
    by_kernel: tuple[Row, ...]
    by_operation: tuple[Row, ...]
    by_layer: tuple[Row, ...]
    one: tuple[Record, ...]

    @property
    def gaps(self) -> float:
        """Microseconds of a recorded step in which nothing ran."""
        return max(0.0, self.recorded - self.busy)

    @property
    def cost(self) -> float:
        """What recording added, as a part of the unprofiled step."""
        return self.recorded / self.unprofiled - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, without the records."""
        named = ("device", "steps", "unprofiled", "recorded", "busy", "waited", "gaps", "launches", "kernels", "named")
        rows = {
            name: [asdict(one) for one in getattr(self, name)] for name in ("by_kernel", "by_operation", "by_layer")
        }
        return {name: getattr(self, name) for name in named} | {"cost": self.cost} | rows


def steps_of(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each whole decode step, from the beginning of its first layer to that of the next step's.

    The first step is left out, as it is the prompt, and so is what follows the last beginning. Raises AccelpatchError
    where there are fewer than two steps, as for a model whose layers are not known.
    """
    layers = [_layer(one) for one in records]
    known = sorted({one for one in layers if one is not None})
    begins, before = list[int](), None
    for place, layer in enumerate(layers):
        if known and layer == known[0] and before != layer:
            begins.append(place)
        if layer is not None or len(known) == 1:  # a kernel without a name inside of a layer begins nothing
            before = layer
    steps = [list(records[begin:end]) for begin, end in pairwise(begins)][1:]
    if not steps:
        raise AccelpatchError(
            "no decode steps can be seen in the trace: ask for more --new-tokens; a model whose layers lie in no "
            "nn.ModuleList cannot be shown"
        )
    return steps


def _layer(record: Record) -> int | None:
    found = LAYER.match(record.part)
    return int(found[1]) if found else None


def summary(records: Sequence[Record], unprofiled: float, device: str) -> Summary:
    """The Summary of a trace's records. unprofiled: seconds of a step without recording."""
    steps = steps_of(records)
    flat = [one for step in steps for one in step]
    last = records.index(steps[-1][-1]) + 1
    begin, end = steps[0][0].start, records[last].start if last < len(records) else steps[-1][-1].end
    period = (end - begin) / len(steps)
    graphs = {one.launch for one in flat if one.in_graph}
    launched = len(graphs) + sum(not one.in_graph for one in flat)

    def rows(key: Callable[[Record], str]) -> tuple[Row, ...]:
        return _rows(flat, key, len(steps), period)

    return Summary(
        device, len(steps), unprofiled * 1e6, period, sum(one.own for one in flat) / len(steps),
        sum(one.waited for one in flat) / len(steps), launched / len(steps),
        len(flat) / len(steps), sum(bool(one.region) for one in flat) / len(flat), rows(lambda one: one.name),
        rows(lambda one: one.operation or (one.part if one.part else UNNAMED)), _by_layer(rows(_part)),
        tuple(steps[len(steps) // 2]),
    )  # fmt: skip


def _part(record: Record) -> str:
    return record.part or OUTSIDE


def _rows(
    records: Sequence[Record], key: Callable[[Record], str], steps: int, period: float
) -> tuple[Row, ...]:  # fmt: skip
    found: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one in records:
        row = found[key(one)]
        row[0] += 1
        row[1] += one.own
        row[2] += one.waited
    made = [
        Row(name, count / steps, ran / steps, waited / steps, ran / steps / period)
        for name, (count, ran, waited) in found.items()
    ]
    return tuple(sorted(made, key=lambda row: -row.microseconds))


def _by_layer(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Layers in their order, then the rest."""

    def place(row: Row) -> int:
        found = LAYER.match(row.name)
        return int(found[1]) if found else 1 << 30

    return tuple(sorted(rows, key=place))
