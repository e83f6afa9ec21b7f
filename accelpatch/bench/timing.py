"""Seconds of repeated calls, with their spread."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def rate(self, count: float) -> dict[str, float]:
        """``count`` things a second: median, low (the slowest repeat) and high."""
        return {
            "median": count / self.median,
            "low": count / max(self.seconds),
            "high": count / min(self.seconds),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"seconds": list(self.seconds), "median": self.median, "spread": self.spread}


def timing(seconds: Sequence[float]) -> Timing:
    """A Timing; ValueError where there is nothing in it, or a clock that did not move."""
    if not seconds or min(seconds) <= 0.0:
        raise ValueError(f"no timing can be made of {list(seconds)}")
    return Timing(tuple(seconds))


def measure(call: Callable[[], Any], *, device: torch.device, repeats: int, warmup: int = 1) -> Timing:
    """Time ``call`` ``repeats`` times after ``warmup`` untimed calls; a GPU is waited for at both ends of each."""
    for _ in range(warmup):
        call()
    return timing([once(call, device) for _ in range(repeats)])


def once(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device; no garbage of others is collected meanwhile."""
    synchronize(device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = perf_counter()
        call()
        synchronize(device)
        return perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on ``device``; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
