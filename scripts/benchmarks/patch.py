"""Seconds that patch() takes at each level of verification, and its stages.

    python scripts/bench.py patch [--model smollm2-135m] [--recipe int8] [--device cpu] [--repeats 5] [--random]

The levels take turns; the first round, in which kernels are loaded and memory is touched, is left out. Medians, with
the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch

import accelpatch
from accelpatch import api
from accelpatch.bench.timing import synchronize
from accelpatch.patching.extent import LEVELS
from scripts.benchmarks.engines import in_turn
from scripts.benchmarks.harness import Option, cases, common, table

CASES = list(LEVELS)
OPTIONS = (
    *common(model="smollm2-135m", device="cpu", dtype="auto", repeats=5), cases(CASES, "Levels of verification."),
    Option("recipe", "int8", "A bundled recipe, or a YAML file."),
    Option("random", False, "Take random weights, for models that are not here."),
)  # fmt: skip


def patching(model: Any, recipe: str, level: str) -> dict[str, float]:
    """Seconds of one patch, which is undone: all of it, and its stages."""
    device = next(model.parameters()).device
    synchronize(device)
    began = time.perf_counter()
    accelpatch.patch(model, recipe, verify=level, progress=False)
    synchronize(device)
    whole = time.perf_counter() - began
    stages = {f"{name}, s": seconds for name, seconds in model.accelpatch.report().seconds.items()}
    accelpatch.unpatch(model)
    return {"patch, s": whole} | stages


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row for each level."""
    make = api.random_model if asked.random else lambda name, **options: api.load(name, **options).model
    model = make(asked.model, device=torch.device(asked.device), dtype=asked.dtype)
    found = in_turn({level: partial(patching, model, asked.recipe, level) for level in asked.cases}, asked.repeats, 1)
    rows = []
    for level, every in found.items():
        times = [one["patch, s"] for one in every]
        row: dict[str, Any] = {"verify": level, "patch, s": 0.0, "fastest to slowest, s": (min(times), max(times))}
        rows.append(row | {name: statistics.median(one.get(name, 0.0) for one in every) for name in every[0]})
    return {"rows": table(rows, f"{asked.model}, {asked.recipe}, median of {asked.repeats} after 1 to warm up")}
