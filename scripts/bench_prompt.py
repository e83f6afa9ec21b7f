"""Time to the first token of long prompts, and the memory that they take: stock transformers beside a recipe.

    python scripts/bench_prompt.py [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes flash]
        [--lengths 2048 8192 32768] [--repeats 5] [--tiny] [--json FILE]

A model of random weights generates one token after a prompt, by stock generate(): with transformers' SDPA, then patched
as users patch it, then by stock again. Memory is the peak beyond the weights and the cache of the prompt.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, cached_bytes, generate, prompt_ids
from accelpatch.bench.timing import once
from accelpatch.device import probe
from accelpatch.models.load import random as random_model

STOCK, AGAIN = "stock transformers", "stock transformers again"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024}  # fmt: skip


def model_of(asked: argparse.Namespace) -> Any:
    """The model of random weights, the same each time; its positions reach as far as the longest prompt."""
    dtype = getattr(torch, asked.dtype)
    if not asked.tiny:
        return random_model(asked.model, dtype=dtype, device=asked.device)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).to(asked.device, dtype).eval()


def engine(name: str, asked: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Length -> seconds to the first token, and the bytes of the peak beyond weights and cache."""
    gc.collect()  # the model before
    model, device = model_of(asked), torch.device(asked.device)
    if name not in (STOCK, AGAIN):
        accelpatch.patch(model, name, keep_original="none")
        report = model.accelpatch.report()
        print(f"{name}: {report.verification.fused_layers} layers fused, over their bound: "
              f"{report.verification.failures or 'none'}", flush=True)  # fmt: skip
    weights = sum(one.numel() * one.element_size() for one in {id(p): p for p in model.parameters()}.values())
    each, found = cached_bytes(model), {}
    for length in asked.lengths:
        ids = prompt_ids(model.config.vocab_size, Shape(1, length, 1)).to(device)
        generate(model, ids, 1)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        call = functools.partial(generate, model, ids, 1)
        seconds = [once(call, device) for _ in range(asked.repeats)]
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        found[length] = {"seconds": statistics.median(seconds), "beyond": float(peak - weights - each * length)}
    if name not in (STOCK, AGAIN):
        print(f"{name}: {dict(model.accelpatch.report().paths)}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="Short name of the model whose shape is taken.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--dtype", default="bfloat16", help="Dtype of weights and activations.")
    parser.add_argument("--recipes", nargs="+", default=["flash"], help="Recipes beside the stock.")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768], help="Tokens of the prompts.")
    parser.add_argument("--repeats", type=int, default=5, help="Calls whose median is taken.")
    parser.add_argument("--tiny", action="store_true", help="A small model, to try the program.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"{probe(torch.device(asked.device)).name}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {asked.model} in {asked.dtype}")  # fmt: skip
    found = {name: engine(name, asked) for name in (STOCK, *asked.recipes, AGAIN)}
    for length in asked.lengths:
        base = found[STOCK][length]["seconds"]
        for name, made in found.items():
            one = made[length]
            beyond = f", {one['beyond'] / 1e9:.2f} GB beyond weights and cache" if one["beyond"] > 0 else ""
            print(f"{length} tokens, {name}: {1e3 * one['seconds']:.1f} ms to the first token "
                  f"({base / one['seconds']:.2f}){beyond}")  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
