"""The prompt of a generate() call by fused layers, written straight into the captured step's static cache."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.graphs.captured_batch import GraphOf
from accelpatch.runtime.graphs.captured_step import CapturedStep
from accelpatch.runtime.graphs.short_prompt import Prompts, captured_tokens

FUSED_PROMPT = "fused prefill"


def why_not(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why the model's own forward must run the prompt ids[B, L]; None where fused layers can."""
    cache, mask, positions = kwargs[CACHE], kwargs.get("attention_mask"), kwargs.get("position_ids")
    if step.fused is None or step.fused.no_prompts:
        return "no fused layers" if step.fused is None else step.fused.no_prompts
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
    fused = step.fused
    assert fused is not None
    if step.prompts is None:
        # padding after a short prompt is overwritten in the cache before a later token attends to it
        own: Any = weakref.ref(step)  # which holds its prompts
        program = lambda ids, positions, last: fused.prompt(ids, positions, None, own().cache, last)  # noqa: E731
        step.prompts = Prompts(program, graph, captured_tokens(fused))
    short = step.prompts.of(ids, step.capacity) if mask is None and chunk is None else None
    whole = positions.contiguous()
    logits = fused.prompt(ids, whole, mask, step.cache, chunk=chunk) if short is None else short(ids, whole)
    logits = logits.to(torch.float32, copy=True)
    for place, held in enumerate(step.cache.layers):
        cache.update(held.keys[:, :, :0], held.values[:, :, :0], place)
    return logits
