"""Times work on the GPU by replays of a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM = 0.2  # seconds of replays before any counts: what ran before (a check in float64, say) shows for a while
BEYOND = 400e6  # bytes of weights in rotation: far more than the L2 cache holds


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for what the work reads
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def seconds(work: Callable[[], object], repeats: int = 12) -> tuple[float, float]:
    """Median and spread (max - min over median) of a graph's replay."""
    graph = graph_of(work)
    until = time.perf_counter() + WARM
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def rotation(n: int, k: int, bits: float) -> int:
    """Weights [n, k] of so many bits a value that lie beyond the cache together."""
    return max(2, int(BEYOND / (n * k * bits / 8)) + 1)
