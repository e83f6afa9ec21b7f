"""Time to the first token of long prompts, and the memory that they take: stock transformers beside a recipe.

    python scripts/bench.py prompt [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes flash]
        [--cases 1x2048+1 1x8192+1 1x32768+1] [--repeats 5] [--tiny]

A model of random weights generates one token after a prompt, by stock generate(): with transformers' SDPA, then patched
as users patch it, then by stock again. Memory is the peak beyond the weights and the cache of the prompt.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from accelpatch.bench.generate import cached_bytes
from scripts.benchmarks.engines import Taken, allocated, answers, figures, freed, patched, random_model, stock, title
from scripts.benchmarks.harness import TINY, Case, cases, common, table

CASES = [Case(1, length, 1) for length in (2048, 8192, 32768)]
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["flash"], repeats=5), cases(CASES), TINY,
)  # fmt: skip
STOCK, AGAIN = "stock transformers", "stock transformers again"


def engine(name: str, asked: argparse.Namespace) -> dict[Case, tuple[Taken, float | None]]:
    """Case -> what was taken, and GB of the peak beyond weights and cache; the model is the same each time."""
    freed()
    model, device = random_model(asked, endless=False), torch.device(asked.device)
    one = stock(model, name) if name in (STOCK, AGAIN) else patched(model, name, keep=False)
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values()) / 1e9
    each, found = cached_bytes(model) / 1e9, {}
    for case in asked.cases:
        ids = case.ids(model)
        one.call(ids, 1)
        if allocated(device) is not None:
            torch.cuda.reset_peak_memory_stats()
        taken = answers({name: one}, ids, case.new, asked.repeats, 0)[name]
        peak = allocated(device, peak=True)
        found[case] = (taken, None if peak is None else peak - weights - each * case.prompt * case.batch)
    if name not in (STOCK, AGAIN):
        print(f"{name}: {dict(model.accelpatch.report().paths)}", flush=True)
    return found


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """One engine after the other, then a table a case."""
    made = {name: engine(name, asked) for name in (STOCK, *asked.recipes, AGAIN)}
    found = {}
    for case in asked.cases:
        rows = figures(case, {name: one[case][0] for name, one in made.items()}, [STOCK])
        rows = [row | {"beyond weights and cache, GB": made[row["engine"]][case][1]} for row in rows]
        found[str(case)] = table(rows, title(case, asked.repeats, 1))
    return found
