"""One run of a kernel as a profiler recorded it, or one counter of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DispatchRecord:
    """run: the same for all records of one run of a kernel; "" where each is its own."""

    kernel: str
    microseconds: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    run: str = ""
