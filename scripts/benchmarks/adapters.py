"""Decoding with LoRA adapters beside the same patched model without them, in one run and in turn.

The model has random weights and is patched with the defaults, verified. A second one, patched without verification,
gets LoRA by PEFT with random factors on all linear layers of the decoder, unmerged. The decode rate is that of the
difference of a long answer and one of 16 tokens. Before anything is timed, the tokens of each engine's steps are held
to its own modules' logits without a cache. `times RECIPE` is the rate over that without adapters.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from scripts.benchmarks.engines import Engine, among_the_best, freed, patched, plain, random_model, turns
from scripts.benchmarks.generate import SHORT
from scripts.benchmarks.harness import TINY, Case, Option, cases, common
from scripts.benchmarks.rates import Rates

OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
    cases([Case(1, 128), Case(8, 128)]),
    Option("rank", 16, "Rank of each adapter."), Option("adapters", 1, "Adapters that are active together."), TINY,
)  # fmt: skip


def adapted(base: Any, recipe: str, asked: argparse.Namespace) -> Engine:
    """A patched copy of `base` with adapters."""
    from peft import LoraConfig, get_peft_model

    given: dict[str, Any] = {"r": asked.rank, "target_modules": "all-linear", "init_lora_weights": False}
    config = LoraConfig(**given, task_type="CAUSAL_LM")
    label = f"{recipe}, LoRA" + (f" x {asked.adapters}" if asked.adapters > 1 else "")
    model: Any = get_peft_model(patched(base, recipe, label, how=plain, verify=False).model, config).eval()
    names = ["default", *(f"next-{i}" for i in range(1, asked.adapters))]
    for name in names[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(names)
    return Engine(label, model, partial(plain, model))


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, print: a table a recipe."""
    base, found = random_model(asked), {}
    for recipe in asked.recipes:
        engine = patched(base, recipe, how=plain)
        engine.bytes = 0
        both = [engine, adapted(base, recipe, asked)]
        for one in both:
            if not among_the_best(one, asked.cases[0].ids(base)):
                raise SystemExit(f"{one.name}: other tokens: nothing is timed over red")
        printed = Rates(f"{asked.model}, rank {asked.rank}, {turns(asked.repeats, 2)}", [recipe], short=SHORT)
        printed.in_turn(both, asked.cases, asked.repeats, 2)
        for one in both:
            print(f"  {one.name}: {dict(one.model.accelpatch.report().paths)}", flush=True)
        found[recipe] = printed.rows
        del engine, both, one
        freed()
    return {"recipes": found}
