"""Seconds that patch() takes at each level of verification, and its stages.

    python scripts/bench_patch.py [--model smollm2-135m] [--recipe int8] [--device cpu] [--repeats 5] [--random]

The levels take turns; the first round, in which kernels are loaded and memory is touched, is left out. Medians, with
the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import accelpatch
from accelpatch import api
from accelpatch.bench.timing import synchronize
from accelpatch.patching.extent import LEVELS


def seconds(model: Any, recipe: str, level: str) -> tuple[float, dict[str, float]]:
    """Of one patch, which is undone: all of it, and its stages."""
    device = next(model.parameters()).device
    synchronize(device)
    began = time.perf_counter()
    accelpatch.patch(model, recipe, verify=level, progress=False)
    synchronize(device)
    whole = time.perf_counter() - began
    stages = dict(model.accelpatch.report().seconds)
    accelpatch.unpatch(model)
    return whole, stages


def main() -> None:
    """Print a line for each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="As in `accelpatch bench`.")
    parser.add_argument("--recipe", default="int8", help="A bundled recipe, or a YAML file.")
    parser.add_argument("--device", default="cpu", help="Of torch.")
    parser.add_argument("--dtype", default="auto", help="Of the weights.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed rounds.")
    parser.add_argument("--random", action="store_true", help="Random weights, for models that are not here.")
    asked = parser.parse_args()
    make = api.random_model if asked.random else lambda name, **options: api.load(name, **options).model
    model = make(asked.model, device=torch.device(asked.device), dtype=asked.dtype)
    found: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for turn in range(asked.repeats + 1):
        for level in LEVELS:
            taken = seconds(model, asked.recipe, level)
            if turn:
                found[level].append(taken)
    for level, all_ in found.items():
        times = sorted(whole for whole, _ in all_)
        stages = {name: statistics.median(one.get(name, 0.0) for _, one in all_) for name in all_[0][1]}
        said = ", ".join(f"{name} {value:.2f}" for name, value in stages.items())
        print(f"{level:6} {statistics.median(times):.2f} s ({times[0]:.2f} to {times[-1]:.2f}): {said}")


if __name__ == "__main__":
    main()
