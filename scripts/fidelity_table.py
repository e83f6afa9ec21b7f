"""Print the tables of docs/fidelity.md: what each number format does to the embedded model, raw and with noise added.

python scripts/fidelity_table.py [--model NAME_OR_FOLDER] [--tokens 2560] [--seed 0] [--recipes smoothquant fp8 ...]
                                 [--methods gptq awq ... [--bits 4 | --budget 4.5bits] [--group 64] [--samples 64]]

--recipes: those that round activations too, by the patched model itself, with noise added; no other table is printed.
--methods: how weights are made, calibrated on samples x 256 tokens of the same prose behind those that are read. Bytes
are those of the linear layers but the head, with their scales; the time is the patch's, in seconds of a CPU's cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.models import load
from accelpatch.modules.quantized_linear import QuantizedLinear
from accelpatch.recipe.methods import by_method
from accelpatch.recipe.recipe import load as load_recipe
from tests.support.fidelity import (
    FORMATS,
    Format,
    english_tokens,
    logits_of,
    mean_kl_top1,
    noised,
    perplexity,
    simulate,
)

HEADER = "| weights | format | mean KL, nats | top-1 agreement | perplexity |\n| --- | --- | --- | --- | --- |"


def rows(name: str, model: nn.Module, ids: Tensor) -> Iterator[str]:
    """The lines of one model: the original's perplexity, then a line for each format."""
    reference = logits_of(model, ids)
    yield f"| {name} | float32 | | | {perplexity(reference, ids):.2f} |"
    for format in FORMATS:
        yield _row(name, model, ids, reference, format)


def _row(name: str, model: nn.Module, ids: Tensor, reference: Tensor, format: Format) -> str:
    logits = logits_of(simulate(model, format), ids)
    found = mean_kl_top1(reference, logits)
    return f"| {name} | {format.name} | {found.kl:.5f} | {found.top1:.1%} | {perplexity(logits, ids):.2f} |"


def recipe_rows(model: nn.Module, ids: Tensor, recipes: list[str]) -> Iterator[str]:
    """A line for each recipe, of the patched model; one that calibrates does so on the model's own text."""
    reference = logits_of(model, ids)
    for name in recipes:
        with accelpatch.patched(model, name, verify=False) as patched:
            logits = logits_of(patched, ids)
        found = mean_kl_top1(reference, logits)
        yield f"| `{name}` | {found.kl:.5f} | {found.top1:.1%} | {perplexity(logits, ids):.2f} |"


def method_rows(loaded: Any, model: nn.Module, ids: Tensor, options: argparse.Namespace) -> Iterator[str]:
    """A line for each method, of the patched model."""
    samples, bits = options.samples, options.bits
    reference = logits_of(model, ids)
    prose = english_tokens(loaded.tokenizer, ids.numel() + 256 * samples)[len(ids) :]
    texts = [loaded.tokenizer.decode(row) for row in prose]
    rule = {"name": "linear", "options": {"group_size": options.group}}
    for method in options.methods:
        recipe = load_recipe({"name": f"int{bits}", "extends": f"int{bits}", "rules": [rule]})
        recipe = by_method(recipe, method, samples, 256) if method != "rtn" else recipe
        start, given = time.process_time(), {"data": texts, "tokenizer": loaded.tokenizer}
        if options.budget:
            recipe = accelpatch.choose_bits(model, options.budget, recipe, **given).recipe
        with accelpatch.patched(model, recipe, verify=False, **(given if method != "rtn" else {})) as patched:
            seconds, size = time.process_time() - start, weight_bytes(patched)
            logits = logits_of(patched, ids)
        found = mean_kl_top1(reference, logits)
        named = (options.budget, "mixed") if options.budget else (bits, options.group)
        figures = f"{found.kl:.4f} | {found.top1:.1%} | {perplexity(logits, ids):.2f} | {size / 1e6:.1f} MB"
        yield f"| `{method}` | {named[0]} | {named[1]} | {figures} | {seconds:.0f} s |"


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the quantised linear layers but the head, as they are saved."""
    held = [module.canonical() for module in model.modules() if isinstance(module, QuantizedLinear)]
    heads = (model.get_output_embeddings().canonical().n,)
    return sum(one.nbytes for one in held if one.n not in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A model's name or folder (default: %(default)s).")
    parser.add_argument("--tokens", type=int, default=2560, help="Tokens of English to read (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=0, help="The seed of the noise (default: %(default)s).")
    parser.add_argument("--recipes", nargs="+", help="Recipes whose patched models are measured in place of formats.")
    parser.add_argument("--methods", nargs="+", help="Methods of making weights, measured in place of formats.")
    parser.add_argument("--bits", type=int, default=4, help="Bits of these weights: 3, 4 or 8 (default: %(default)s).")
    parser.add_argument("--budget", help="Or bits a weight, such as 4.5bits, within which each layer has its own.")
    parser.add_argument("--group", type=int, default=64, help="Their group size (default: %(default)s).")
    parser.add_argument("--samples", type=int, default=64, help="Windows they calibrate on (default: %(default)s).")
    options = parser.parse_args()
    loaded = load.load(options.model, dtype=torch.float32)
    ids = english_tokens(loaded.tokenizer, options.tokens)
    if options.recipes:
        print("| recipe | mean KL, nats | top-1 agreement | perplexity |\n| --- | --- | --- | --- |")
        for row in recipe_rows(noised(loaded.model, options.seed), ids, options.recipes):
            print(row, flush=True)
        return
    if options.methods:
        print("| method | bits | groups | mean KL, nats | top-1 agreement | perplexity | bytes | time |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        model = noised(loaded.model, options.seed)
        for row in method_rows(loaded, model, ids, options):
            print(row, flush=True)
        return
    print(HEADER)
    for name, model in (("noised", noised(loaded.model, options.seed)), ("raw", loaded.model)):
        for row in rows(name, model, ids):
            print(row, flush=True)


if __name__ == "__main__":
    main()
