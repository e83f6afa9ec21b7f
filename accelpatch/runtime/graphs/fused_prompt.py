"""The prompt of a generate() call by fused layers, written straight into the captured step's static cache."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.graphs.captured_batch import GraphOf
from accelpatch.runtime.graphs.captured_step import CapturedStep
from accelpatch.runtime.graphs.short_prompt import Prompts

FUSED_PROMPT = "fused prefill"


def why_not(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why the model's own forward must run the prompt ids[B, L]; None where fused layers can."""
    cache, mask, positions = kwargs[CACHE], kwargs.get("attention_mask"), kwargs.get("position_ids")
    if reason := step.no_prompts:
        return reason
    if cache.get_seq_length():
        return "the cache holds tokens already"
    if positions is None or positions.shape != ids.shape or (mask is not None and mask.shape != ids.shape):
        return "positions or an attention mask of another shape than the ids"
    return None


@torch.no_grad()
def fused_prompt(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any], graph: GraphOf, chunk: int | None) -> Tensor:
    """Logits [B, V] float32 after ids[B, L], cached in the step's cache; the call's own cache is initialised.

    chunk: as of FusedModel.prompt.
    """
    mask, cache, positions = kwargs.get("attention_mask"), kwargs[CACHE], kwargs["position_ids"]
    if mask is not None and bool(mask.all()):
        mask = None
    if step.prompts is None:
        # padding after a short prompt is overwritten in the cache before a later token attends to it
        own: Any = weakref.ref(step)  # which holds its prompts
        program = lambda ids, positions, last: own().prompt(ids, positions, None, last)  # noqa: E731
        step.prompts = Prompts(program, graph, step.captured_tokens)
    short = step.prompts.of(ids, step.capacity) if mask is None and chunk is None else None
    whole = positions.contiguous()
    logits = step.prompt(ids, whole, mask, chunk=chunk) if short is None else short(ids, whole)
    logits = logits.to(torch.float32, copy=True)
    for place, held in enumerate(step.cache.layers):
        cache.update(held.keys[:, :, :0], held.values[:, :, :0], place)
    return logits
