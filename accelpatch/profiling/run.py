"""Records a model's generate() by torch's profiler, the original and the patched one alike."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from accelpatch.bench.generate import Shape, generate, measure_generate, prompt_ids
from accelpatch.bench.timing import synchronize
from accelpatch.profiling import trace
from accelpatch.profiling.recorder import Region, RegionRecorder, recording
from accelpatch.profiling.summary import Summary, summary
from accelpatch.profiling.trace import Record
from accelpatch.runtime.generation.patched_model import RUNTIME

SECONDS = 20.0  # of the measurement without recording
REPEATS, TIMED = 3, 64  # of so many tokens at least: a few take no longer than what a prompt varies by
WAITS = 5  # for the GPU, which the trace and this process see: their clocks are compared by them
ENOUGH = 0.9  # of the kernels: fewer names are a fault of the clocks


@dataclass(frozen=True)
class Profile:
    """One model's profile. events: of the trace, kernels with their names. regions: what was marked. composed: names of
    operations whose work is that of others inside of them."""

    summary: Summary
    events: Sequence[Mapping[str, Any]]
    records: Sequence[Record]
    regions: Mapping[str, Region]
    composed: frozenset[str]

    def write(self, path: Path) -> None:
        """Write the trace as a file for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""
        path.write_text(json.dumps({"traceEvents": self.events}, separators=(",", ":")), encoding="utf-8")


def record(
    model: nn.Module, shape: Shape, *, repeats: int = REPEATS, progress: Callable[[str], None] = lambda said: None
) -> Profile:  # fmt: skip
    """The profile of greedy generate() of `shape`. What was captured of a patched model is captured again.

    Raises AccelpatchError where another profile is being recorded, or where there are too few tokens.
    """
    device = next(model.parameters()).device
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    ids = prompt_ids(config.vocab_size, shape).to(device)
    progress("timing it without recording")
    room = getattr(config, "max_position_embeddings", None) or shape.prompt + TIMED
    longer = replace(shape, new=max(shape.new, min(TIMED, room - shape.prompt)))
    figures = measure_generate(model, longer, repeats=repeats, seconds=SECONDS)
    modes = (False, True) if device.type == "cuda" else (True,)
    made = _recorded(model, ids, shape, modes[0], progress)
    for mode in modes[1:]:
        if _named(made.records) < ENOUGH:  # the clocks of this driver cannot be compared
            progress("recording again, with the CPU's operations")
            made = max(made, _recorded(model, ids, shape, mode, progress), key=lambda one: _named(one.records))
    return Profile(
        summary(made.records, 1.0 / figures.steps_per_second, device.type), trace.with_names(made.events, made.records),
        made.records, made.to.regions, made.to.composed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Recorded:
    events: Sequence[Mapping[str, Any]]
    records: Sequence[Record]
    to: RegionRecorder


def _recorded(
    model: nn.Module, ids: Tensor, shape: Shape, by_profiler: bool, progress: Callable[[str], None]
) -> _Recorded:  # fmt: skip
    gpu = ids.device.type == "cuda"
    with recording(model, shape.prompt + shape.new // 2, by_profiler) as regions:
        programs: list[list[Record]] = []
        if gpu and RUNTIME in vars(model):
            progress("capturing it again, to name the kernels of graphs")
            _forget_graphs(model)
            first = _events(model, ids, shape, regions, times=2)  # a prompt is captured at its second use
            programs = trace.captured(trace.complete(first), regions.regions)
        else:
            generate(model, ids, 2)  # the first run in regions is slower
            regions.noted.clear()
        progress("recording")
        events = _events(model, ids, shape, regions)
    whole = trace.complete(events)
    read = trace.kernels(whole, regions.regions, programs) if gpu else trace.host_operations(whole, regions.regions)
    return _Recorded(events, read, regions)


def _named(records: Sequence[Record]) -> float:
    return sum(bool(one.region) for one in records) / max(1, len(records))


def _forget_graphs(model: nn.Module) -> None:
    """Drop what was captured of a patched model: the next step captures it again, and is recorded."""
    runtime = vars(model).get(RUNTIME)
    with suppress(AttributeError):  # of a CPU, which captures nothing
        runtime.close()  # type: ignore[union-attr]


def _events(
    model: nn.Module, ids: Tensor, shape: Shape, regions: RegionRecorder, times: int = 1
) -> list[dict[str, Any]]:  # fmt: skip
    """The events of recorded calls of generate(), regions among them."""
    gpu = ids.device.type == "cuda"
    activities = [ProfilerActivity.CPU] if regions.by_profiler else []
    with profile(activities=[*activities, *([ProfilerActivity.CUDA] if gpu else [])]) as done:
        waits = [_waited(ids.device) for _ in range(WAITS)]
        for _ in range(times):
            generate(model, ids, shape.new)
        synchronize(ids.device)
    with tempfile.TemporaryDirectory(prefix="accelpatch-trace-") as folder:
        path = Path(folder) / "trace.json"
        done.export_chrome_trace(str(path))
        events, base = trace.read_timed(path)
    return events + regions.events(trace.clock_offset(trace.complete(events), base, waits))


def _waited(device: torch.device) -> tuple[int, int]:
    """When waiting for a GPU began and ended, by time.time_ns()."""
    begun = time.time_ns()
    synchronize(device)
    return begun, time.time_ns()
