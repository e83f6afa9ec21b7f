"""Prefill and decode time of a causal language model through its own ``generate()``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.bench.timing import Timing, once, timing
from accelpatch.errors import AccelpatchError
from accelpatch.runtime.graphs.kv_cache import cache_of

FEW = 4  # tokens of the warm-up of a slow model: by then each kernel has run
Progress = Callable[[int, int, float | None], None]


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
            "repeats": len(self.prefill.seconds),
            "prefill": self.prefill.to_dict() | {"tokens_per_second": self.prefill_rate},
            "decode": self.decode.to_dict() | {"tokens_per_second": self.decode_rate},
        }


def measure_generate(
    model: nn.Module, shape: Shape, *, repeats: int, seconds: float = math.inf, progress: Progress | None = None,
    draft: nn.Module | None = None,
) -> Figures:  # fmt: skip
    """Time greedy generate() for 1 and for ``shape.new`` tokens alternately, ``repeats`` times; end tokens are ignored.

    The decode time of a repeat is the difference of its two calls, so that prompt and set-up drop out. seconds: no
    repeat but the first begins that would end later than this, warm-up included. progress: called before each call of
    generate() with the number of those that are done, of all that there will be, and the estimate of the seconds that
    are left (None before anything is known). draft: a model that drafts tokens for it.
    """
    report, start = progress or (lambda *_: None), time.monotonic()
    device = next(model.parameters()).device
    ids = prompt_ids(model.config.get_text_config(decoder=True).vocab_size, shape).to(device)  # type: ignore[operator, union-attr]
    report(0, 2 * repeats + 2, None)
    each = _warm_up(model, ids, shape, seconds, draft)
    short, difference, planned = list[float](), list[float](), repeats
    while len(short) < planned:
        fitting = int(min(repeats, (seconds - (time.monotonic() - start)) / each))
        planned = min(planned, max(len(short) + fitting, 1))
        if len(short) == planned:
            break
        report(2 * len(short) + 2, 2 * planned + 2, (planned - len(short)) * each)
        begin = time.monotonic()
        short.append(once(lambda: generate(model, ids, 1, draft), device))
        report(2 * len(short) + 1, 2 * planned + 2, None)
        difference.append(once(lambda: generate(model, ids, shape.new, draft), device) - short[-1])
        each = time.monotonic() - begin
    report(2 * planned + 2, 2 * planned + 2, 0.0)
    if min(difference) <= 0.0:
        raise AccelpatchError(
            f"generating {shape.new} tokens took no longer than generating one: the machine is too busy, or the answer "
            "too short to be timed; use more --new-tokens"
        )
    return Figures(shape, timing(short), timing(difference))


def _warm_up(model: nn.Module, ids: Tensor, shape: Shape, seconds: float, draft: nn.Module | None) -> float:
    """Run each kernel, and where a tenth of the time is enough for it, all that is timed; returns the estimate of the
    seconds of a repeat."""
    times = [time.monotonic()]
    some = min(FEW, shape.new)
    for tokens in (1, some):
        generate(model, ids, tokens, draft)
        times.append(time.monotonic())
    prompt, few = times[1] - times[0], times[2] - times[1]
    each = 2 * min(prompt, few) + (shape.new - 1) * max(0.0, few - prompt) / (some - 1)
    if shape.new <= FEW or each > seconds / 10:
        return each
    generate(model, ids, shape.new, draft)
    return min(prompt, few) + time.monotonic() - times[-1]


def cached_bytes(model: nn.Module) -> int:
    """Bytes that one token of a sequence adds to the KV cache, measured by a call for one token; 0 without a cache."""
    one = torch.ones(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode():
        cache = cache_of(model(input_ids=one, attention_mask=one, use_cache=True))
    tensors = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def prompt_ids(vocabulary: int, shape: Shape) -> Tensor:
    """Fixed pseudo-random ids [batch, prompt]; the bytes that a step reads do not depend on them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (shape.batch, shape.prompt), generator=generator)


def generate(model: nn.Module, ids: Tensor, new_tokens: int, draft: nn.Module | None = None) -> Tensor:
    """Generate exactly ``new_tokens`` greedy tokens after ``ids``; end-of-sequence tokens do not stop it.

    draft: a model that drafts them.
    """
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    options |= {"num_beams": 1} | ({} if draft is None else {"assistant_model": draft})
    with torch.inference_mode():
        output: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    if output.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"generate() made {output.shape[1] - ids.shape[1]} tokens where {new_tokens} were asked for")
    return output
