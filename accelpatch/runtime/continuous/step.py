"""A call of the model over the pages of continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.fusion.native_rows import logits_of_rows
from accelpatch.fusion.paged_call import PagedCall
from accelpatch.fusion.paged_step import logits_of_step
from accelpatch.models.multimodal import is_multimodal, outputs_of
from accelpatch.modules.attention_settings import SETTING
from accelpatch.modules.paged_attention import no_mask
from accelpatch.modules.paged_cache import PagedCache
from accelpatch.modules.paged_setting import PAGED
from accelpatch.runtime.continuous import pages
from accelpatch.runtime.cpu.native_step import NativeRuntime
from accelpatch.runtime.cpu.torch_threads import all_threads
from accelpatch.runtime.graphs.runtime import CapturedRuntime

CONTINUOUS = "continuous batching"
STOCK = f"{CONTINUOUS}, transformers' attention"
PLAIN_CACHE = f"{CONTINUOUS}: pages in the model's dtype, and not in "
KEPT = "logits_to_keep"
Found = tuple[Tensor | None, str]  # logits [n, V] of the rows that the call keeps, or None; and by what, for the report


def outputs(runtime: Any, forward: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """The model's outputs after a call over pages, whose arguments by name are `given`; None where transformers' own
    attention runs it. forward: of the model's own class."""
    if vars(model.config).get(SETTING) != PAGED:
        runtime.paths[STOCK] += 1
        return None
    if (reason := pages.why_not(given)) is not None:
        raise KernelError(f"continuous batching gave the model {reason}: leave max_blocks_per_request at its default")
    cache, by_rows = pages.paged_cache(given), _native if isinstance(runtime, NativeRuntime) else _fused
    with all_threads():
        logits, how = by_rows(runtime, model, given, cache)
        runtime.paths[f"{CONTINUOUS}, {how}"] += 1
        if runtime.kv_cache != "auto":
            runtime.paths[PLAIN_CACHE + runtime.kv_cache] += 1
        if logits is not None:
            return outputs_of(model, logits=logits[None])
        given = {**given, pages.PAGED_CACHE: cache, "attention_mask": no_mask(given["input_ids"])}
        return forward(model, **given)


def _native(runtime: NativeRuntime, model: Any, given: Mapping[str, Any], cache: PagedCache) -> Found:
    """By native functions on a CPU."""
    reading = runtime.reading(model)
    found = reading.model
    if found is None or (reason := _of_call(model)) is not None:
        return None, f"modules: {reading.unfit if found is None else reason}"
    reason = reading.watch.objection() or ("a hook inside" if reading.watch.watched() else None)
    if reason is None and found.unfused:
        reason = found.unfused[min(found.unfused)]
    if reason is not None:
        return None, f"modules: {reason}"
    ids, positions, kept = given["input_ids"][0], given["position_ids"][0], _kept(given)
    logits = logits_of_step(found, ids, positions, cache, given[pages.PAGED_CACHE])
    if logits is not None:
        every = kept.tolist() == list(range(len(logits)))  # as in most steps: nothing to copy
        return logits if every else logits.index_select(0, kept), "native step"
    return logits_of_rows(found, ids, positions, cache, kept), "native rows"


def _fused(runtime: CapturedRuntime, model: Any, given: Mapping[str, Any], cache: PagedCache) -> Found:
    """By fused layers, which a graph may hold: nothing is read on the host."""
    if not runtime.lock.acquire(blocking=False):  # what its layers write in a step is one call's
        return None, "modules: another thread is within a call of the model"
    try:
        return _by_fused_layers(runtime, model, given, cache)
    finally:
        runtime.lock.release()


def _by_fused_layers(runtime: CapturedRuntime, model: Any, given: Mapping[str, Any], cache: PagedCache) -> Found:
    reason = _of_call(model)
    fused, watched = (None, []) if reason else runtime.fused(model, graphs=True)
    if fused is None:
        return None, f"modules: {reason or runtime.captured.why_not_fused or 'no layer is fused'}"
    reason = fused.no_prompts or ("parts on several devices" if fused.in_parts else None)
    if reason is not None or not fused.places - set(watched):
        return None, f"modules: {reason or 'a hook in each layer'}"
    given[pages.PAGED_CACHE].held_by_graphs = fused  # transformers' graphs hold its weights' addresses
    positions = given["position_ids"].long()
    x = fused.embedded(given["input_ids"], positions)
    normal = fused.normal(*fused.run(x, PagedCall(fused.decoder(), cache, positions), watched))
    logits = fused.logits_of(normal.index_select(0, _kept(given)))
    return logits, f"fused layers{fused.exceptions_with(watched)}"


def _of_call(model: Any) -> str | None:
    """Why this call needs the modules; None where it does not."""
    if is_multimodal(model):
        return "a multimodal model"
    return "gradients or autocast" if torch.is_grad_enabled() or torch.is_autocast_enabled(model.device.type) else None


def _kept(given: Mapping[str, Any]) -> Tensor:
    """The rows whose logits the caller wants."""
    kept, ids = given.get(KEPT, 0), given["input_ids"]
    if isinstance(kept, Tensor):
        return kept
    every = torch.arange(ids.shape[1], device=ids.device)
    return every[-kept:] if kept else every
