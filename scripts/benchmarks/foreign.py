"""Checkpoints that others quantised beside the project's own recipes, and bitsandbytes' own nf4: new tokens a second.

    python scripts/bench.py foreign [--model llama2-7b] [--layers N] [--device cuda] [--cases gptq awq nf4 ...]
        [--own int4 int8 exact] [--batch 1 32] [--bitsandbytes] [--repeats 5]
    python scripts/bench.py foreign --model qwen3-8b --cases "fp8 blocks" --own int8 exact --batch 1 32

Folders of the named shape with random codes are written to a temporary folder and loaded as users load them
(accelpatch.load). Of the project's own, int4 and int8 have the same head, int4 in groups of 128; exact rounds nothing.
Batches are sequences at once, a table each. Each loaded model's captured step is first held to its
module path: the same tokens. Every engine runs once in each of `--repeats` turns. --bitsandbytes: the nf4 folder by
transformers and bitsandbytes, stock generate().
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import accelpatch
from accelpatch.bench.generate import generate
from accelpatch.bench.read_limit import read_limit
from accelpatch.recipe import recipe
from scripts.benchmarks.engines import Engine, answers, figures, freed, introduce, patched, random_model, stock, title
from scripts.benchmarks.harness import TINY, Case, Option, cases, common, table
from scripts.benchmarks.random_checkpoints import CONFIGS, write

THEIRS = "bitsandbytes"
CASES, WARM_UP = CONFIGS, 2
OPTIONS = (
    *common(model="llama2-7b", device="cuda", repeats=5), cases(CASES, "Kinds of checkpoints."),
    Option("layers", None, "Fewer layers than the model has.", kind=int),
    Option("own", ["int4"], "Own formats to time beside them.", ["int4", "int8", "exact"]),
    Option("batch", [1], "Sequences at once."),
    Option("bitsandbytes", False, "Time bitsandbytes' own nf4 too."), Option("new", 128, "New tokens."), TINY,
)  # fmt: skip
RECIPE = """
name: own
extends: exact
verify: {bound: 0.3}
rules: [{name: linear, match: {role: linear}, replace: REPLACER, options: OPTIONS}]
"""
REPLACERS = {
    "int4": ("int4_weight_only", "{group_size: [128, 64]}"),
    "int8": ("int8_weight_only", "{group_size: null}"),
}


def small(model: Any, layers: int) -> Any:
    """The model with fewer layers."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    return model


def based(asked: argparse.Namespace) -> Any:
    """The model in floats, of as many layers as are asked for."""
    base = small(random_model(asked, endless=False), asked.layers or 10**6)
    base.config.num_hidden_layers = len(base.model.layers)
    return base


def engines(asked: argparse.Namespace, folder: Path) -> dict[str, Engine]:
    """Own formats, each checkpoint as it is loaded, and bitsandbytes' own nf4."""
    base = based(asked)
    folders = {kind: folder / kind.replace(", ", "-") for kind in asked.cases}
    for kind, place in folders.items():
        start = time.perf_counter()
        size = write(place, kind, base)
        print(f"{kind}: {size / 1e9:.2f} GB written in {time.perf_counter() - start:.1f} s", flush=True)
    made = {}
    for name in asked.own:
        how: Any = name
        if name in REPLACERS:
            replacer, options = REPLACERS[name]
            how = recipe.parse(RECIPE.replace("REPLACER", replacer).replace("OPTIONS", options), source=name)
        own = f"{name}, own"
        made[own] = patched(based(asked) if base is None else base, how, own, keep=False)
        base = None
        freed()
    for kind, place in folders.items():
        start = time.perf_counter()
        model = accelpatch.load(str(place), dtype=torch.bfloat16, device=asked.device).model
        size = model.accelpatch.report().token_bytes[1]
        made[kind] = replace(stock(model, kind, size), seconds={"load": time.perf_counter() - start})
        introduce(made[kind])
        freed()
    if asked.bitsandbytes:
        from transformers import AutoModelForCausalLM

        options: Any = {"dtype": torch.bfloat16, "device_map": {"": asked.device}}
        theirs = AutoModelForCausalLM.from_pretrained(folder / "nf4", **options).eval()
        made[THEIRS] = replace(stock(theirs, THEIRS), most=min(asked.new, 24))
    return made


def checked(made: dict[str, Engine], ids: Tensor) -> list[str]:
    """The engines whose captured steps give other tokens than calls of the model without a cache."""
    bad = []
    for name, engine in made.items():
        if name == THEIRS:
            continue
        with torch.inference_mode():
            tokens = generate(engine.model, ids, 8)
            logits = engine.model(tokens[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :].float()
        new = tokens[:, ids.shape[1] :]
        short = logits.max(-1).values - logits.gather(-1, new[..., None])[..., 0]
        gap = float((short / logits.std(-1)).max())
        print(f"{name}: tokens of captured steps are within {gap:.3f} standard deviations of the best", flush=True)
        bad += [name] * (not gap < 0.1)
    return bad


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Write, load, check, time."""
    with tempfile.TemporaryDirectory() as folder:
        made = engines(asked, Path(folder))
    found, first = {}, next(iter(made.values())).model
    if bad := checked(made, Case(1, 128, asked.new).ids(first)):
        sys.exit(f"other tokens, so nothing is timed: {', '.join(bad)}")
    limit = read_limit(torch.device(asked.device)).bytes_per_second
    for batch in asked.batch:
        case = Case(batch, 128, asked.new)
        taken = answers(made, case.ids(first), case.new, asked.repeats, WARM_UP)
        read = {name: float(one.bytes) for name, one in made.items()} if batch == 1 and THEIRS not in made else None
        rows = figures(case, taken, [*(f"{name}, own" for name in asked.own), THEIRS], limit=limit, read=read)
        loads = [{"loaded, s": made[row["engine"]].seconds.get("load")} for row in rows]
        both = [row | more for row, more in zip(rows, loads, strict=True)]
        found[f"rows of batch {batch}"] = table(both, title(case, asked.repeats, WARM_UP))
    return found
