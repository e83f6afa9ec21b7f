"""The genetic search of `accelpatch tune hipblaslt` beside an exhaustive sweep of the same choices.

Linear layers of a 7B model in bf16 by accelpatch's Triton GEMM, on the GPU that is here: first every choice of its
parameters is measured once (more than 500 a shape), then the search gets a quarter of that number of trials. It is run
with several seeds on the sweep's own times, and once with times of its own; what that one finds is timed again beside
the shipped configuration, and the weighted uplift is that of one call of each shape a layer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from accelpatch.tuning.hipblaslt import search, triton_configuration
from accelpatch.tuning.hipblaslt.gemms import Gemm
from accelpatch.tuning.hipblaslt.search import Outcome
from accelpatch.tuning.hipblaslt.space import Choice, Space, key_of
from scripts.benchmarks.harness import Option, Table, cases
from scripts.benchmarks.kernels import HIDDEN, LAYER

CASES = {name: (rows, columns) for name, rows, columns in LAYER}  # rows and columns of the weight
OPTIONS = (
    cases(["qkv", "down"], "The linear layers to tune.", CASES), Option("tokens", 64, "Rows of x."),
    Option("seeds", 5, "Searches on the sweep's times, each with another seed."),
    Option("part", 4, "The search gets one trial for so many choices of the sweep."),
)  # fmt: skip


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


def searched(
    gemm: Gemm, space: Space, asked: argparse.Namespace, measure: Callable[[Choice], Outcome], first: Choice | None
) -> tuple[dict[str, Any], Choice]:
    """The figures of a shape, and the best choice of the search with times of its own."""
    compile_all(gemm, choices(space))
    whole = {key_of(choice): measure(choice) for choice in choices(space)}
    ran = [one.microseconds for one in whole.values() if one.microseconds is not None]
    best, trials = min(ran), space.size // asked.part

    def found(seed: int, by: Callable[[Choice], Outcome]) -> Any:
        return search.best_of(search.search(space, by, trials=trials, seed=seed, first=first))

    known = [found(seed, lambda one: whole[key_of(one)]) for seed in range(asked.seeds)]
    beside = [one.outcome.microseconds / best for one in known if one and one.outcome.microseconds]
    own = found(asked.seeds, measure).choice
    return {
        "choices": space.size, "that ran": len(ran), "best of the sweep, us": best, "trials": trials,
        "search beside the best, worst seed, ratio": max(beside),
        "seeds within 2%": f"{sum(one <= 1.02 for one in beside)} of {len(beside)}",
        "own times: best again, ratio": (whole[key_of(own)].microseconds or 0.0) / best,
    }, own  # fmt: skip


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Print a line a shape, and the weighted uplift."""
    from accelpatch.tuning.hipblaslt.triton_gemms import TritonGemms, shipped

    search.check_installed()
    platform, before, after = TritonGemms("0"), 0.0, 0.0
    printed = Table(f"linear layers of width {HIDDEN} by the Triton GEMM")
    for name in asked.cases:
        gemm = gemm_of(name, asked.tokens)
        space = triton_configuration.space_of(gemm)
        row, chosen = searched(
            gemm, space, asked, lambda one, gemm=gemm: platform.measure(gemm, one, None, Path()), shipped(gemm)
        )
        stock, tuned = platform.microseconds(gemm, None), platform.microseconds(gemm, chosen)
        text = " ".join(f"{key}={chosen[key]}" for key in space.free)
        printed.add({"shape": f"{name} {gemm.m} x {gemm.k}, {gemm.n} tokens"} | row | {
            "shipped, us": stock, "tuned, us": tuned, "uplift, ratio": stock / tuned, "choice": text
        })  # fmt: skip
        before, after = before + stock, after + tuned
    print(f"\nweighted uplift over the shipped configuration: {before / after - 1:+.1%}")
    return {"rows": printed.rows, "weighted_uplift": before / after - 1}
