"""The kernels of a decode step by torch's profiler: the difference of a call with 33 and one with 1 new token, by 32.

Every rank of a job makes the same calls, so that none waits for another that makes none.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from accelpatch.bench.timing import once
from scripts.benchmarks.engines import plain
from scripts.benchmarks.harness import Table

STEPS, LISTED, NAME = 32, 14, 60  # steps of a trace; kernels of a table, and characters of their names
Times = dict[str, tuple[float, float]]


def kernels_of_a_step(model: Any, ids: Tensor, file: Path, title: str) -> None:
    """Write the trace of a call on rank 0 to `file`, and print its kernels: how many a step, and their microseconds.

    Times of kernels may overlap; those of an all-reduce have the waiting for other ranks in them.
    """
    for new in (1, STEPS + 1):
        plain(model, ids, new)
    seconds = [once(lambda new=new: plain(model, ids, new), ids.device) for new in (1, STEPS + 1)]  # type: ignore[misc]
    first, whole = _recorded(model, ids, 1)[0], _recorded(model, ids, STEPS + 1)
    if dist.is_initialized() and dist.get_rank():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    whole[1].export_chrome_trace(str(file))
    step = 1e6 * (seconds[1] - seconds[0]) / STEPS
    rows = [
        {"kernel": name[:NAME], "a step": (count - first.get(name, (0.0, 0.0))[0]) / STEPS,
         "a step, us": (taken - first.get(name, (0.0, 0.0))[1]) / STEPS}
        for name, (count, taken) in whole[0].items()
    ]  # fmt: skip
    rows = sorted((row for row in rows if float(row["a step, us"]) > 0), key=lambda row: -float(row["a step, us"]))
    total = {"kernel": "all kernels", "a step": sum(float(row["a step"]) for row in rows),
             "a step, us": sum(float(row["a step, us"]) for row in rows)}  # fmt: skip
    Table(f"{file.name}, {title}: a step takes {step:.1f} us without recording").add(*rows[:LISTED], total)


def _recorded(model: Any, ids: Tensor, new: int) -> tuple[Times, Any]:
    """Name -> number and microseconds of a call's kernels (on a CPU: of its operations); and the profile."""
    gpu = ids.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as done:
        plain(model, ids, new)
        if gpu:
            torch.cuda.synchronize()
    found: Times = defaultdict(lambda: (0.0, 0.0))
    for event in done.key_averages():
        taken = event.self_device_time_total if gpu else event.self_cpu_time_total
        found[event.key] = (found[event.key][0] + event.count, found[event.key][1] + taken)
    return dict(found), done
