"""Compares a causal language model before and after a patch on a text: KL, top-1 agreement and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.patching.placement import device_of
from accelpatch.patching.verify import kl_divergence

WINDOW = 512  # tokens of context


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model before and after a patch, over the same `tokens` predicted tokens of a text.

    kl: mean KL(original || patched) in nats. top1: share of equal most likely tokens. perplexity_before,
    perplexity_after: exp of the mean negative log-likelihood of the text.
    """

    kl: float
    top1: float
    perplexity_before: float
    perplexity_after: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def compare(
    model: nn.Module,
    input_ids: Tensor,
    patched: AbstractContextManager[nn.Module],
    progress: Callable[[str, int, int], None] | None = None,
    window: int = WINDOW,
    stride: int | None = None,
) -> Evaluation:
    """Evaluate `model` on input_ids [1, L], first as it is, then within the context `patched`.

    window: tokens of one forward, at most the model's context. stride: tokens from the start of one window to the next;
    where windows overlap, only tokens that no window before has predicted are counted. Default: no overlap. Keeps the
    original's logits on the CPU, L x vocabulary x 4 bytes. Raises PatchError for fewer than two tokens, or a stride
    larger than the window.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise PatchError(f"an evaluation needs token ids of shape [1, L], L at least 2, not {list(input_ids.shape)}")
    size = min(window, getattr(getattr(model, "config", None), "max_position_embeddings", None) or window)
    if not 0 < (step := stride or size) <= size or size < 2:
        raise PatchError(f"windows of {size} tokens cannot be {step} apart: a stride is from 1 to the window")
    windows = _windows(input_ids, size, step)
    report = progress or (lambda stage, done, total: None)
    before = list(_logits(model, windows, lambda done: report("original", done, len(windows))))
    kl = agree = likely = likely_after = 0.0
    with patched:
        after = _logits(model, windows, lambda done: report("patched", done, len(windows)))
        for (ids, first), p, q in zip(windows, before, after, strict=True):
            targets = ids[0, first:].cpu()
            kl += kl_divergence(p, q).sum().item()
            agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
            likely += nn.functional.cross_entropy(p, targets, reduction="sum").item()
            likely_after += nn.functional.cross_entropy(q, targets, reduction="sum").item()
    count = sum(ids.shape[1] - first for ids, first in windows)
    return Evaluation(kl / count, agree / count, math.exp(likely / count), math.exp(likely_after / count), count)


def _windows(input_ids: Tensor, size: int, step: int) -> list[tuple[Tensor, int]]:
    """(ids [1, at most size], index in them of the first token that is predicted): each token of the text but the first
    is predicted once."""
    found, stop = [], 1  # stop: index of the first token of the text that is not predicted yet
    for start in range(0, input_ids.shape[1], step):
        ids = input_ids[:, start : start + size]
        first = max(stop - start, 1)
        if first < ids.shape[1]:
            found.append((ids, first))
            stop = start + ids.shape[1]
    return found


@torch.no_grad()
def _logits(model: nn.Module, windows: list[tuple[Tensor, int]], progress: Callable[[int], None]) -> Iterator[Tensor]:
    """Logits [predicted tokens, V] in float32 on the CPU, window by window."""
    device = device_of(model)
    for done, (ids, first) in enumerate(windows):
        output = model(input_ids=ids.to(device), use_cache=False)
        yield output.logits[0, first - 1 : -1].float().cpu()
        progress(done + 1)
