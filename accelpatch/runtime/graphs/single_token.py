"""One more token a row over transformers' cache, by a captured step: for beam search, stock loops with hooks, and loops
of a program's own.

The cache's contents move into the step's static cache at the first token and stay there, until the step is used for
another cache or someone touches keys or values (cache_contents.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_call import CacheCall
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.spread import computes_on
from accelpatch.runtime.cache_contents import attached, storing
from accelpatch.runtime.graphs.kv_cache import NotCaptured, capacity_for, grown, shapes_of
from accelpatch.runtime.graphs.step import CAPTURED


def why_not(fused: FusedModel, ids: Tensor, call: CacheCall) -> str | None:
    """Why a captured step cannot run a call; None where it can."""
    rows, length = ids.shape
    if length != 1 or not call.past or rows > fused.most:
        return "it is not one more token of each row"
    elsewhere = fused.spread is None and ids.device != computes_on(fused.embedding)
    if elsewhere or not all(layer.is_initialized for layer in storing(call.cache)):
        return "its cache holds nothing, or lies elsewhere"
    contents = attached(call.cache)
    if (call.cache if contents is None else contents.static).layers[0].keys.shape[0] != rows:
        return "its cache is of another number of rows"
    if call.mask is not None and not bool(call.mask[:, -1].all()):
        return "a new token is hidden"
    return None


@torch.no_grad()
def stepped(runtime: Any, model: Any, ids: Tensor, call: CacheCall, watched: tuple[int, ...]) -> Tensor | None:
    """Logits [B, 1, V] after ids[B, 1], for which `why_not` has no reason; None where there is no step.

    The model's runtime must be locked. watched: places of layers with hooks.
    """
    captured, key = runtime.captured, (len(ids), watched)
    if key in captured.uncaptured or captured.why_not is not None:
        return None
    if runtime.max_length is not None and call.past >= runtime.max_length:
        return None  # the recipe wants no larger static cache
    captured.know(model.get_output_embeddings().out_features, call.cache)
    if not captured.learned and not runtime.learned(model):
        return None
    try:
        contents = attached(call.cache)
        full = contents is not None and contents.static.layers[0].keys.shape[2] == call.past
        longest = runtime.max_length
        capacity = grown(call.past, longest) if full else capacity_for(call.past + 1, longest)
        step = runtime.step(model, len(ids), capacity, watched)
        if contents is None or not step.holds(contents):
            if shapes_of(call.cache) != shapes_of(step.cache):
                return None
            contents = step.attach(call.cache)
    except (NotCaptured, torch.OutOfMemoryError):
        captured.uncaptured.add(key)
        return None
    step.batch.tokens.copy_(ids[:, 0])
    step.batch.begin(call.past, call.positions)
    step.show(call.past, None if call.mask is None else call.mask[:, :-1])
    step.replay(contents, call)
    contents.grow()
    runtime.paths[CAPTURED] += 1
    runtime.paths[captured.way(step, watched)] += 1
    return step.batch.logits.to(model.dtype, copy=True)[:, None]
