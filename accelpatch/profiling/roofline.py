"""Every operation of a decode step compared with what the memory and the arithmetic units can do at most.

Bytes and operations are those that the shapes ask for (work.py), times those of a recorded run. The read limit is
measured by a plain read of a large buffer, the peak by a square product of torch in the model's dtype: what this
machine gives, and not what a data sheet says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accelpatch.bench.read_limit import ReadLimit
from accelpatch.bench.timing import measure
from accelpatch.profiling.run import Profile
from accelpatch.profiling.summary import steps_of
from accelpatch.report import human, table

NUMBERED = re.compile(r", \d+$")
REST = "other"
PEAK_ON_CPU, PEAK_ON_GPU = 1024, 8192  # rows and columns of the product


@dataclass(frozen=True)
class Point:
    """One operation. All are of one token: count, microseconds, bytes, operations. read_share, peak_share: of the
    limits; 0 where nothing is known of its work."""

    operation: str
    count: float
    microseconds: float
    bytes: float
    operations: float
    read_share: float
    peak_share: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def bound(self) -> str:
        """Which of the limits is nearer, "read" or "peak"; "" where nothing is known."""
        return "" if not self.bytes else "read" if self.read_share >= self.peak_share else "peak"


@dataclass(frozen=True)
class Roofline:
    """points: the longest first. step: microseconds while recorded. read_limit: bytes a second. peak: operations a
    second, of `peak_dtype`."""

    points: tuple[Point, ...]
    step: float
    read_limit: float
    peak: float
    peak_dtype: str

    @property
    def covered(self) -> float:
        """The part of the step that the operations with known bytes take."""
        return sum(one.microseconds for one in self.points if one.bytes) / self.step

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        points = [asdict(one) | {"intensity": one.intensity, "bound": one.bound} for one in self.points]
        return {"step_microseconds": self.step, "read_limit": self.read_limit, "peak": self.peak,
                "peak_dtype": self.peak_dtype, "covered": self.covered, "operations": points}  # fmt: skip


def peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of torch's product of two square matrices, the fastest of 5."""
    size = PEAK_ON_CPU if device.type == "cpu" else PEAK_ON_GPU
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    taken = measure(lambda: a @ b, device=device, repeats=5, warmup=2)
    return 2 * size**3 / min(taken.seconds)


def roofline(profile: Profile, limit: ReadLimit, most: float, dtype: torch.dtype) -> Roofline:
    """The Roofline of a recorded model. most: of `peak`, in dtype."""
    steps = steps_of(profile.records)
    times: dict[str, float] = defaultdict(float)
    seen: dict[str, int] = defaultdict(int)
    for step in steps:
        for one in step:
            times[one.region] += one.own
        for name in {one.region for one in step}:
            seen[name] += 1
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for name, time in times.items():
        region = profile.regions.get(name)
        known = None if region is None or name in profile.composed else region.work
        label = NUMBERED.sub("", region.operation) if region is not None and region.operation else REST
        count = seen[name]
        made = (count, time, count * known.bytes, count * known.operations) if known else (count, time, 0, 0)
        sums[label] = [before + more for before, more in zip(sums[label], made, strict=True)]
    points = [_point(label, [one / len(steps) for one in of], limit, most) for label, of in sums.items()]
    points.sort(key=lambda one: -one.microseconds)
    return Roofline(
        tuple(points), profile.summary.recorded, limit.bytes_per_second, most, str(dtype).removeprefix("torch.")
    )


def _point(label: str, of: Sequence[float], limit: ReadLimit, most: float) -> Point:
    count, time, read, flop = of
    seconds = time / 1e6
    shares = (read / seconds / limit.bytes_per_second, flop / seconds / most) if seconds else (0.0, 0.0)
    return Point(label, count, time, read, flop, *shares)


def text(found: Roofline) -> str:
    """The roofline as a table, with the limits below."""
    rows = [("operation", "a token", "us", "read", "GB/s", "of the limit", "GFLOP/s", "of the peak", "FLOP a byte")]
    for one in found.points:
        known = one.bytes > 0 and one.microseconds > 0
        rates = (
            human(int(one.bytes)), f"{one.bytes / one.microseconds / 1e3:,.1f}", f"{one.read_share:.0%}",
            f"{one.operations / one.microseconds / 1e3:,.1f}", f"{one.peak_share:.1%}", f"{one.intensity:.2f}",
        ) if known else ("",) * 6  # fmt: skip
        rows.append((one.operation[:60], f"{one.count:g}", f"{one.microseconds:,.1f}", *rates))
    limits = (
        f"limits  read {found.read_limit / 1e9:,.1f} GB/s, measured; peak {found.peak / 1e9:,.0f} GFLOP/s, by a "
        f"product of torch in {found.peak_dtype}"
    )
    step = f"step    {found.step:,.0f} us while recorded; bytes are known of operations that take {found.covered:.0%}"
    return "\n".join([table(rows), "", limits, step])


def draw(found: Roofline, title: str, path: Path) -> None:
    """Draw the roofline into an image file; its suffix is the format."""
    from matplotlib.figure import Figure  # the object interface: no window, no global state

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    known = [one for one in found.points if one.bytes and one.operations and one.microseconds]
    ridge = found.peak / found.read_limit
    low, high = _range((one.intensity for one in known), ridge)
    grid = [low * (high / low) ** (at / 200) for at in range(201)]
    axes.plot(grid, [min(found.peak, one * found.read_limit) / 1e9 for one in grid], color="black", linewidth=1.2)
    longest = max((one.microseconds for one in known), default=1.0)
    for one in known:
        rate = one.operations / one.microseconds / 1e3
        axes.scatter([one.intensity], [rate], s=30 + 500 * one.microseconds / longest, color="#d1495b", alpha=0.55)
    for one in known[:8]:
        rate = one.operations / one.microseconds / 1e3
        axes.annotate(one.operation[:40], (one.intensity, rate), (16, -4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s")
    axes.set_title(
        f"{title}\nread {found.read_limit / 1e9:,.0f} GB/s, peak {found.peak / 1e9:,.0f} GFLOP/s; area: time of a step",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _range(intensities: Iterable[float], ridge: float) -> tuple[float, float]:
    every = [*intensities, ridge]
    return min(every) / 3, max(every) * 4
