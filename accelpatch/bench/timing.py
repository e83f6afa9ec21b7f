"""Timing of repeated calls."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

WARM_UP = 0.2  # seconds of replays before any counts: what ran before (a check in float64, say) shows for a while


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def rate(self, count: float) -> dict[str, float]:
        """Rates for ``count`` items per call, in items per second: median, low (slowest repeat) and high."""
        return {
            "median": count / self.median,
            "low": count / max(self.seconds),
            "high": count / min(self.seconds),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"seconds": list(self.seconds), "median": self.median, "spread": self.spread}


def timing(seconds: Sequence[float]) -> Timing:
    """Make a Timing. Raises ValueError where it is empty or a time is not positive."""
    if not seconds or min(seconds) <= 0.0:
        raise ValueError(f"no timing can be made of {list(seconds)}")
    return Timing(tuple(seconds))


def measure(call: Callable[[], Any], *, device: torch.device, repeats: int, warmup: int = 1) -> Timing:
    """Time ``call`` ``repeats`` times after ``warmup`` untimed calls; a GPU is synchronised before and after each."""
    for _ in range(warmup):
        call()
    return timing([once(call, device) for _ in range(repeats)])


def once(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, with the device synchronised before and after and garbage collection off."""
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


def measure_replays(work: Callable[[], Any], repeats: int = 12) -> Timing:
    """Time ``work`` on the current GPU by ``repeats`` replays of a graph of it, after as many as warm the GPU up."""
    graph = graph_of(work)
    until = perf_counter() + WARM_UP
    while perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    return timing([between_events(graph.replay) for _ in range(repeats)])


def graph_of(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ``work`` on the current GPU, which has run once before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for what the work reads
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def between_events(call: Callable[[], Any]) -> float:
    """Seconds on the current stream between an event before ``call`` and one after it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on ``device``; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
