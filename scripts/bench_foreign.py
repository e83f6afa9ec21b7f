"""Checkpoints that others quantised beside the project's own int4, and bitsandbytes' own nf4: new tokens a second.

    python scripts/bench_foreign.py [--model llama2-7b] [--layers N] [--device cuda] [--kinds gptq awq nf4 ...]
        [--bitsandbytes] [--repeats 5] [--json FILE]

Folders of the named shape with random codes are written to a temporary folder and loaded as users load them
(accelpatch.load). Own int4 has the same head, and groups of 128. Each loaded model's captured step is first held to its
module path: the same tokens. Every engine runs once in each of `--repeats` turns. --bitsandbytes: the nf4 folder by
transformers and bitsandbytes, stock generate().
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.timing import once
from accelpatch.device import probe
from accelpatch.models import load
from accelpatch.recipe import recipe
from scripts.benchmarks.random_checkpoints import CONFIGS, write

OWN = "int4, own"
RECIPE = """
name: own
extends: exact
verify: {bound: 0.3}
rules: [{name: linear, match: {role: linear}, replace: int4_weight_only, options: {group_size: [128, 64]}}]
"""


def small(model: Any, layers: int) -> Any:
    """The model with fewer layers."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    return model


def engines(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Engine -> its model, patched; and bitsandbytes' own."""
    base = small(load.random(asked.model, dtype="bfloat16", device=asked.device), asked.layers or 10**6)
    base.config.num_hidden_layers = len(base.model.layers)
    made: dict[str, Any] = {}
    for kind in asked.kinds:
        start = time.perf_counter()
        size = write(folder / kind.replace(", ", "-"), kind, base)
        print(f"{kind}: {size / 1e9:.2f} GB written in {time.perf_counter() - start:.1f} s", flush=True)
    accelpatch.patch(base, recipe.parse(RECIPE, source="own"), keep_original="none")
    made[OWN] = said(OWN, base)
    for kind in asked.kinds:
        start = time.perf_counter()
        model = accelpatch.load(str(folder / kind.replace(", ", "-")), dtype=torch.bfloat16, device=asked.device).model
        made[kind] = said(f"{kind} (loaded in {time.perf_counter() - start:.1f} s)", model)
    if asked.bitsandbytes:
        from transformers import AutoModelForCausalLM

        made["bitsandbytes"] = AutoModelForCausalLM.from_pretrained(
            folder / "nf4", dtype=torch.bfloat16, device_map={"": asked.device}
        ).eval()
    return made


def said(name: str, model: Any) -> Any:
    """The model, after what its report says."""
    report = model.accelpatch.report()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    sites = {site.replacer for site in report.sites if site.path.endswith("proj")}
    failures = report.verification.failures if report.verification else ()
    print(f"{name}: {sorted(map(str, sites))}, {len(failures)} over their bound; {'; '.join(report.notes)}", flush=True)
    for failure in failures[:3]:
        print(f"  {failure}", flush=True)
    return model


def checked(made: dict[str, Any], ids: Tensor) -> list[str]:
    """The engines whose captured steps give other tokens than calls of the model without a cache."""
    bad = []
    for name, model in made.items():
        if name == "bitsandbytes":
            continue
        with torch.inference_mode():
            tokens = generate(model, ids, 8)
            logits = model(tokens[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :].float()
        new = tokens[:, ids.shape[1] :]
        short = logits.max(-1).values - logits.gather(-1, new[..., None])[..., 0]
        gap = float((short / logits.std(-1)).max())
        print(f"{name}: tokens of captured steps are within {gap:.3f} standard deviations of the best", flush=True)
        bad += [name] * (not gap < 0.1)
    return bad


def timed(made: dict[str, Any], shape: Shape, asked: argparse.Namespace) -> dict[str, float]:
    """Engine -> new tokens a second, medians."""
    device = torch.device(asked.device)
    ids = prompt_ids(next(iter(made.values())).config.vocab_size, shape).to(device)
    if bad := checked(made, ids):
        sys.exit(f"other tokens, so nothing is timed: {', '.join(bad)}")
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(asked.repeats + 2):
        for name, model in made.items():
            new = min(shape.new, 24) if name == "bitsandbytes" else shape.new
            one = once(lambda model=model: generate(model, ids, 1), device)
            more = once(lambda model=model, new=new: generate(model, ids, new), device) - one
            if turn > 1:
                seconds[name].append(more / (new - 1))
    return {name: shape.batch / statistics.median(times) for name, times in seconds.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="Shape of the model, a name of the catalog.")
    parser.add_argument("--layers", type=int, help="Fewer layers than it has.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--kinds", nargs="+", default=list(CONFIGS), choices=list(CONFIGS), help="Checkpoints.")
    parser.add_argument("--bitsandbytes", action="store_true", help="Time bitsandbytes' own nf4 too.")
    parser.add_argument("--new", type=int, default=128, help="New tokens.")
    parser.add_argument("--repeats", type=int, default=5, help="Turns in which every engine runs once.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"{probe(torch.device(asked.device)).name}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        made = engines(asked, Path(folder))
    rates = timed(made, Shape(1, 128, asked.new), asked)
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} tokens/s, {rate / rates[OWN]:.3f} of own int4", flush=True)
    if "bitsandbytes" in rates:
        print(f"nf4 beside bitsandbytes: {rates['nf4'] / rates['bitsandbytes']:.1f} times")
    if asked.json:
        asked.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
