"""The genetic search of `accelpatch tune hipblaslt` beside an exhaustive sweep of the same choices.

    python scripts/bench.py gemm_search [--cases qkv down] [--tokens 64] [--seeds 5]
    python scripts/bench.py gemm_search --simulated

Linear layers of a 7B model in bf16 by accelpatch's Triton GEMM, on the GPU that is here: first every choice of its
parameters is measured once (more than 500 a shape), then the search gets a quarter of that number of trials. It is run
with several seeds on the sweep's own times, and once with times of its own; what that one finds is timed again beside
the shipped configuration, and the weighted uplift is that of one call of each shape a layer. --simulated takes the cost
model in the place of the GPU, to try the program: its figures are no measurements, and every line says so.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from accelpatch.tuning.hipblaslt import configuration, search, simulated, triton_configuration
from accelpatch.tuning.hipblaslt.gemms import Gemm
from accelpatch.tuning.hipblaslt.search import Outcome
from accelpatch.tuning.hipblaslt.space import Choice, Space, key_of
from scripts.benchmarks.harness import Option, cases, table
from scripts.benchmarks.kernels import HIDDEN, LAYER

CASES = {name: (rows, columns) for name, rows, columns in LAYER}  # rows and columns of the weight
OPTIONS = (
    cases(["qkv", "down"], "The linear layers to tune.", CASES),
    Option("tokens", 64, "Rows of x."),
    Option("seeds", 5, "Searches on the sweep's times, each with another seed."),
    Option("part", 4, "The search gets one trial for so many choices of the sweep."),
    Option("simulated", False, "Take the cost model of an AMD GPU in the place of this one."),
)
ARCH = "gfx942"  # of the cost model
Measure = Callable[[Gemm, Choice], Outcome]


def gemm_of(name: str, tokens: int) -> Gemm:
    """A linear layer as a GEMM of hipBLASLt: its weight is A, transposed."""
    rows, columns = CASES[name]
    leading = (columns, columns, rows, rows)
    return Gemm("T", "N", rows, tokens, columns, 1, "bf16_r", "bf16_r", "bf16_r", "bf16_r", "f32_r", leading)


def choices(space: Space) -> list[Choice]:
    """All of them."""
    free = space.free
    places = itertools.product(*(range(len(values)) for values in free.values()))
    return [space.choice(dict(zip(free, one, strict=True))) for one in places]


def small_space(gemm: Gemm) -> Space:
    """A part of TensileLite's choices, small enough to be swept, for the cost model."""
    values = dict(configuration.space_of(gemm, ARCH).values)
    instructions = values["MatrixInstruction"]
    values["MatrixInstruction"] = instructions[:: max(1, len(instructions) // 12)][:12]
    return Space(values | {"TransposeLDS": (1,), "SourceSwap": (1,), "StaggerU": (32,), "WorkGroupMapping": (1, 8)})


def by_cost_model(gemm: Gemm, choice: Choice) -> Outcome:
    """What the cost model says."""
    reason = simulated.why_not(gemm, choice, ARCH)
    return Outcome(None, reason) if reason else Outcome(simulated.microseconds(gemm, choice, ARCH))


def _compile(given: tuple[Gemm, Choice]) -> None:
    """In a process of its own: leaves the compiled kernel in Triton's cache. A choice that fails, fails again later."""
    from accelpatch.tuning.hipblaslt.triton_gemms import failures, run

    gemm, choice = given
    x = torch.zeros(gemm.n, gemm.k, device="cuda", dtype=torch.bfloat16)
    w = torch.zeros(gemm.m, gemm.k, device="cuda", dtype=torch.bfloat16)
    try:
        run(x, w, choice)
    except failures():
        return


def compile_all(gemm: Gemm, listed: list[Choice]) -> None:
    """Compile all choices' kernels in parallel; those with other splits share one."""
    needed = {key_of({**one, "SPLITS": min(2, int(str(one["SPLITS"])))}): one for one in listed}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(16, os.cpu_count() or 1)), mp_context=context) as pool:
        list(pool.map(_compile, [(gemm, one) for one in needed.values()], chunksize=4))


def sweep(gemm: Gemm, space: Space, measure: Measure) -> dict[str, Outcome]:
    """The outcome of every choice, by `key_of`."""
    found = {}
    for place, choice in enumerate(choices(space)):
        found[key_of(choice)] = measure(gemm, choice)
        if place % 200 == 199:
            print(f"{place + 1} of {space.size} choices are measured", flush=True)
    return found


def _row(name: str, gemm: Gemm, asked: argparse.Namespace, measure: Measure, space: Space, first: Choice | None) -> Any:
    """The figures of a shape, and the best choice of the search with times of its own."""
    whole = sweep(gemm, space, measure)
    ran = [one.microseconds for one in whole.values() if one.microseconds is not None]
    best, trials = min(ran), space.size // asked.part
    known = [
        search.best_of(search.search(space, lambda one: whole[key_of(one)], trials=trials, seed=seed, first=first))
        for seed in range(asked.seeds)
    ]
    beside = [one.outcome.microseconds / best for one in known if one and one.outcome.microseconds]
    own = search.best_of(
        search.search(space, lambda one: measure(gemm, one), trials=trials, seed=asked.seeds, first=first)
    )
    assert own is not None
    row = {
        "shape": f"{name} {gemm.m} x {gemm.k}, {gemm.n} tokens", "choices": space.size, "that ran": len(ran),
        "best of the sweep, us": best, "trials": trials, "search beside the best, worst seed, ratio": max(beside),
        "seeds within 2%": f"{sum(one <= 1.02 for one in beside)} of {len(beside)}",
        "own times: best again, ratio": (whole[key_of(own.choice)].microseconds or 0.0) / best,
    }  # fmt: skip
    return row, own.choice


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Print a line a shape, and the weighted uplift."""
    said, timed, first = "SIMULATED, no measurement: " if asked.simulated else "", _simulated, _no_choice
    measure, space_of = by_cost_model, small_space
    if not asked.simulated:
        from accelpatch.tuning.hipblaslt.triton_gemms import TritonGemms, shipped

        platform, nothing = TritonGemms("0"), Path()

        def measure(gemm: Gemm, choice: Choice) -> Outcome:
            return platform.measure(gemm, choice, None, nothing)  # type: ignore[arg-type]

        def timed(gemm: Gemm, choice: Choice | None) -> float:
            return platform.microseconds(gemm, choice)

        space_of, first = triton_configuration.space_of, shipped
    rows, before, after = [], 0.0, 0.0
    for name in asked.cases:
        gemm = gemm_of(name, asked.tokens)
        space = space_of(gemm)
        if not asked.simulated:
            compile_all(gemm, choices(space))
        row, chosen = _row(name, gemm, asked, measure, space, first(gemm))
        stock, tuned = timed(gemm, None), timed(gemm, chosen)
        chosen_text = " ".join(f"{key}={chosen[key]}" for key in space.free)
        rows.append(
            row | {"shipped, us": stock, "tuned, us": tuned, "uplift, ratio": stock / tuned, "choice": chosen_text}
        )
        before, after = before + stock, after + tuned
    made = table(rows, f"{said}linear layers of width {HIDDEN} by {'the cost model' if said else 'the Triton GEMM'}")
    print(f"\n{said}weighted uplift over the shipped configuration: {before / after - 1:+.1%}")
    return {"rows": made, "weighted_uplift": before / after - 1, "simulated": asked.simulated}


def _simulated(gemm: Gemm, choice: Choice | None) -> float:
    return simulated.microseconds(gemm, choice or simulated.reference(gemm, ARCH), ARCH)


def _no_choice(gemm: Gemm) -> Mapping[str, Any] | None:
    return None
