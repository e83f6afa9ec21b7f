"""Prefill and decode time of a causal language model through its own ``generate()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.bench.timing import Timing, once, timing
from accelpatch.errors import AccelpatchError
from accelpatch.runtime.graphs.captured_cache import cache_of


@dataclass(frozen=True)
class Shape:
    """Size of a benchmark: ``batch`` sequences of ``prompt`` tokens, and ``new`` tokens to generate for each."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Figures:
    """prefill: time of a generate() call for one token. decode: additional time for ``shape.new`` - 1 more tokens."""

    shape: Shape
    prefill: Timing
    decode: Timing

    @property
    def prefill_rate(self) -> dict[str, float]:
        """Prompt tokens per second over all sequences: median, low, high."""
        return self.prefill.rate(self.shape.batch * self.shape.prompt)

    @property
    def decode_rate(self) -> dict[str, float]:
        """New tokens per second over all sequences: median, low, high."""
        return self.decode.rate(self.shape.batch * (self.shape.new - 1))

    @property
    def steps_per_second(self) -> float:
        """Median decode steps per second; each step reads every weight once."""
        return (self.shape.new - 1) / self.decode.median

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "prefill": self.prefill.to_dict() | {"tokens_per_second": self.prefill_rate},
            "decode": self.decode.to_dict() | {"tokens_per_second": self.decode_rate},
        }


def measure_generate(model: nn.Module, shape: Shape, *, repeats: int, warmup: int = 1) -> Figures:
    """Time greedy generate() for 1 and for ``shape.new`` tokens alternately, ``repeats`` times; end tokens are ignored.

    The decode time of a repeat is the difference of its two calls, so that prompt and set-up drop out.
    """
    device = next(model.parameters()).device
    ids = prompt_ids(model.config.get_text_config(decoder=True).vocab_size, shape).to(device)  # type: ignore[operator, union-attr]
    for _ in range(warmup):
        generate(model, ids, 1)
        generate(model, ids, shape.new)
    short, difference = [], []
    for _ in range(repeats):
        short.append(once(lambda: generate(model, ids, 1), device))
        difference.append(once(lambda: generate(model, ids, shape.new), device) - short[-1])
    if min(difference) <= 0.0:
        raise AccelpatchError(
            f"generating {shape.new} tokens took no longer than generating one: the machine is too busy, or the answer "
            "too short to be timed; use more --new-tokens"
        )
    return Figures(shape, timing(short), timing(difference))


def cached_bytes(model: nn.Module) -> int:
    """Bytes that one token of a sequence adds to the KV cache, measured by a call for one token; 0 without a cache."""
    one = torch.ones(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode():
        cache = cache_of(model(input_ids=one, attention_mask=one, use_cache=True))
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def prompt_ids(vocabulary: int, shape: Shape) -> Tensor:
    """Fixed pseudo-random ids [batch, prompt]; the bytes that a step reads do not depend on them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (shape.batch, shape.prompt), generator=generator)


def generate(model: nn.Module, ids: Tensor, new_tokens: int) -> Tensor:
    """Generate exactly ``new_tokens`` greedy tokens after ``ids``; end-of-sequence tokens do not stop it."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    with torch.inference_mode():
        output: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    if output.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"generate() made {output.shape[1] - ids.shape[1]} tokens where {new_tokens} were asked for")
    return output
