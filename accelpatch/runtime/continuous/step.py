"""A call of the model over the pages of continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.fusion.native_rows import logits_of_rows
from accelpatch.models.multimodal import is_multimodal, outputs_of
from accelpatch.modules.attention_settings import SETTING
from accelpatch.modules.paged_attention import no_mask
from accelpatch.modules.paged_cache import PagedCache
from accelpatch.modules.paged_setting import PAGED
from accelpatch.runtime.continuous import pages
from accelpatch.runtime.cpu.native_step import NativeRuntime
from accelpatch.runtime.cpu.torch_threads import all_threads

CONTINUOUS = "continuous batching"
STOCK = f"{CONTINUOUS}, transformers' attention"
KEPT = "logits_to_keep"


def outputs(runtime: Any, forward: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """The model's outputs after a call over pages, whose arguments by name are `given`; None where transformers' own
    attention runs it. forward: of the model's own class."""
    if vars(model.config).get(SETTING) != PAGED:
        runtime.paths[STOCK] += 1
        return None
    if (reason := pages.why_not(given)) is not None:
        raise KernelError(f"continuous batching gave the model {reason}: leave max_blocks_per_request at its default")
    cache = pages.paged_cache(given)
    with all_threads():
        logits, reason = _by_rows(runtime, model, given, cache)
        if logits is not None:
            runtime.paths[f"{CONTINUOUS}, native rows"] += 1
            return outputs_of(model, logits=logits[None])
        runtime.paths[f"{CONTINUOUS}, modules: {reason}"] += 1
        given = {**given, pages.PAGED_CACHE: cache, "attention_mask": no_mask(given["input_ids"])}
        return forward(model, **given)


def _by_rows(runtime: Any, model: Any, given: Mapping[str, Any], cache: PagedCache) -> tuple[Tensor | None, str]:
    """Logits [n, V] of the rows that the call keeps, by native functions; or None and the reason."""
    if not isinstance(runtime, NativeRuntime):
        return None, "this device has no fused layers over pages"
    if is_multimodal(model):
        return None, "a multimodal model"
    reading = runtime.reading(model)
    found = reading.model
    if found is None:
        return None, str(reading.unfit)
    reason = reading.watch.objection() or ("a hook inside" if reading.watch.watched() else None)
    if reason is None and found.unfused:
        reason = found.unfused[min(found.unfused)]
    if reason is not None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None, reason or "gradients or autocast"
    ids, kept = given["input_ids"][0], given.get(KEPT, 0)
    if not isinstance(kept, Tensor):
        kept = torch.arange(len(ids))[-kept:] if kept else torch.arange(len(ids))
    return logits_of_rows(found, ids, given["position_ids"][0], cache, kept), ""
