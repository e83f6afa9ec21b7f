"""Print the tables of docs/attention.md: what a KV cache in 8 bits does to a model's next tokens, and to what it finds.

python scripts/kv_fidelity.py [--model smollm2-135m] [--tokens 2048] [--lengths 2048 4096 7000] [--needles 10]
                              [--formats int8 fp8] [--device cpu]

The first table: a text of so many tokens, all of whose steps go over the cache, beside the same steps over a float
cache: mean KL divergence, share of steps with the same best token, perplexity. The second: a pass key in prose of so
many tokens, at depths that are spread over it, and a question for it; how often the model gives the key. A prompt's
keys and values are computed once in floats; the question and the answer are steps over the cache in each format. The
bytes are those of a token's keys and values where they lie.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.layouts.kv_states import tensors_of
from accelpatch.models import load
from accelpatch.recipe.recipe import Runtime
from accelpatch.runtime.cache_contents import attached
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime, patched_classes
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.fidelity import english_tokens, mean_kl_top1, perplexity

FLOAT, DIGITS, FIRST = "auto", 5, 16  # a float cache in a recipe; digits of a key; tokens of the first prompt
NEEDLE = "\n\nThe pass key is {0}. Remember it. {0} is the pass key.\n\n"
QUESTION = "\n\nThe pass key is"


class Formats:
    """One patched model, and a runtime for each format of the KV cache."""

    def __init__(self, model: Any, formats: list[str]):
        accelpatch.patch(model, "exact", verify=False)
        self.model, self.device = model, next(model.parameters()).device
        first = vars(model)[RUNTIME]
        self.runtimes = {FLOAT: first}
        for name in formats:
            made: Any = new_runtime(self.device.type, Runtime(kv_cache=name))
            patched_classes(model, made)  # it gets the model's watch
            made.code, made.unfused = first.code, first.unfused
            self.runtimes[name] = made

    def use(self, name: str) -> None:
        """Steps go over a cache in this format from here on."""
        vars(self.model)[RUNTIME] = self.runtimes[name]

    def steps(self, name: str) -> int:
        """How many steps went over it so far."""
        return sum(self.runtimes[name].paths[path] for path in (NATIVE, CAPTURED))

    @torch.no_grad()
    def prompt(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of ids[1, L] in floats."""
        self.use(FLOAT)
        cache = self.model(ids, use_cache=True, logits_to_keep=1)[CACHE]
        return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def cache(self, states: list[tuple[Tensor, Tensor]]) -> Any:
        """A cache that holds them."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for place, (keys, values) in enumerate(states):
            cache.update(keys, values, place)
        return cache

    @torch.no_grad()
    def step(self, token: Tensor, cache: Any) -> Tensor:
        """Logits [V] after token[1]."""
        logits: Tensor = self.model(token.view(1, 1), **{CACHE: cache}).logits
        return logits[0, -1]


def token_bytes(cache: Any) -> int:
    """Bytes of a token's keys and values, where they lie."""
    contents = attached(cache)
    assert contents is not None
    layers = contents.static.layers
    held = (one for layer in layers for states in (layer.keys, layer.values) for one in tensors_of(states))
    return sum(one.nbytes // (one.shape[0] * one.shape[2]) for one in held)


def texts(formats: Formats, ids: Tensor) -> Iterator[str]:
    """A line for each format: the steps of ids[L]."""
    states = formats.prompt(ids[None, :FIRST])
    reference: Tensor | None = None
    for name in formats.runtimes:
        formats.use(name)
        cache, before = formats.cache(states), formats.steps(name)
        logits = torch.stack([formats.step(token, cache).cpu() for token in ids[FIRST:]])
        if formats.steps(name) - before != len(logits):
            raise SystemExit(f"not all of {len(logits)} tokens were steps: {formats.runtimes[name].paths}")
        reference = logits if reference is None else reference
        found, size = mean_kl_top1(reference, logits), token_bytes(cache)
        spread = f"{found.kl:.5f} | {found.top1:.1%}" if name != FLOAT else "|"
        yield f"| {_label(name)} | {size:,} | {spread} | {perplexity(logits[None], ids[None, FIRST:]):.3f} |"


def _label(name: str) -> str:
    return name if name != FLOAT else "float"


def haystack(tokenizer: Any, length: int, depth: float, draw: random.Random) -> tuple[Tensor, str]:
    """(ids[1, length], number): prose with the needle at a depth from 0 to 1."""
    number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    needle = tokenizer(NEEDLE.format(number), return_tensors="pt").input_ids[0]
    prose = english_tokens(tokenizer, 8192).flatten()[: length - needle.numel()]
    at = int(depth * prose.numel())
    return torch.cat([prose[:at], needle, prose[at:]])[None], number


def found_in(formats: Formats, tokenizer: Any, states: Any, number: str) -> bool:
    """Whether the model goes on with the number."""
    asked = tokenizer(QUESTION, return_tensors="pt").input_ids[0]
    cache, answer = formats.cache(states), list[int]()
    for token in asked.to(formats.device):
        logits = formats.step(token, cache)
    while len(answer) < DIGITS + 1:
        answer.append(int(logits.argmax()))
        logits = formats.step(torch.tensor(answer[-1], device=formats.device), cache)
    return str(tokenizer.decode(answer)).strip().startswith(number)


def needles(formats: Formats, tokenizer: Any, lengths: list[int], count: int) -> Iterator[str]:
    """A line for each length."""
    draw = random.Random(0)
    for length in lengths:
        found = dict.fromkeys(formats.runtimes, 0)
        for place in range(count):
            ids, number = haystack(tokenizer, length, (place + 0.5) / count, draw)
            states = formats.prompt(ids.to(formats.device))
            for name in formats.runtimes:
                formats.use(name)
                found[name] += found_in(formats, tokenizer, states, number)
        yield f"| {length:,} | {count} | " + " | ".join(f"{n}" for n in found.values()) + " |"


def main() -> None:
    """Load, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A catalog name or a folder.")
    parser.add_argument("--tokens", type=int, default=2048, help="Tokens of the text; 0: no first table.")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 7000], help="Tokens of the haystacks.")
    parser.add_argument("--needles", type=int, default=10, help="Haystacks of each length, with a needle each.")
    parser.add_argument("--formats", nargs="+", default=["int8", "fp8"], help="Formats beside a float cache.")
    parser.add_argument("--device", default="cpu", help="Where it runs.")
    parser.add_argument("--dtype", default="float32", help="The model's dtype.")
    asked = parser.parse_args()
    loaded = load.load(asked.model, dtype=getattr(torch, asked.dtype), device=asked.device)
    formats = Formats(loaded.model, asked.formats)
    if asked.tokens:
        ids = english_tokens(loaded.tokenizer, -(-asked.tokens // 256) * 256).flatten()[: asked.tokens]
        print(
            "| cache | bytes a token | mean KL, nats | top-1 agreement | perplexity |\n| --- | --- | --- | --- | --- |"
        )
        for line in texts(formats, ids.to(formats.device)):
            print(line, flush=True)
    if asked.lengths:
        print(f"\n| tokens | needles | {' | '.join(_label(name) for name in formats.runtimes)} |")
        print("| --- " * (2 + len(formats.runtimes)) + "|")
        for line in needles(formats, loaded.tokenizer, asked.lengths, asked.needles):
            print(line, flush=True)


if __name__ == "__main__":
    main()
