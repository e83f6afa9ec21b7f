"""One new token of each of a few texts over the pages of continuous batching, as one native call on a CPU.

More texts, and prompts, run by native_rows.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelpatch.fusion.native_model import NativeModel
from accelpatch.kernels import regions
from accelpatch.kernels.cpu.paged_step import PagedStep
from accelpatch.modules.paged_cache import PagedCache


def logits_of_step(model: NativeModel, ids: Tensor, positions: Tensor, cache: PagedCache, owner: Any) -> Tensor | None:
    """Logits float32 [B, V] of ids[B] at positions[B], whose keys and values go into the pages; None where the call is
    none for one native step. Every layer must have a native form.

    owner: transformers' cache, which holds the pages as long as it lives.
    """
    rows = cache.rows
    single = None if rows is None or regions.recorder is not None or len(ids) > PagedStep.most else rows.single
    if single is None or len(single[0]) != len(ids):
        return None
    _, index, starts, ends = single
    step = _step(model, cache, owner)
    if int((ends - starts).max()) > step.length:
        return None
    return step.run(ids.long(), ends - 1, starts, positions.long(), index)


def _step(model: NativeModel, cache: PagedCache, owner: Any) -> PagedStep:
    """The step over these pages, made anew where they lie elsewhere than before."""
    layers = [cache.of(place) for place in range(len(model.layers))]
    keys, values = [one.keys for one in layers], [one.values for one in layers]
    found, where = model.paged.get(owner, (None, None)), [one.data_ptr() for one in (*keys, *values)]
    if found[0] is None or found[1] != where:
        tokens = min(map(len, (*keys, *values)))  # they may lie in one tensor, each a page behind the one before
        keys, values = ([one[:tokens] for one in some] for some in (keys, values))
        step = PagedStep(model.shape, model.layers, model.embedding, model.head, model.final_norm, keys, values)
        model.paged[owner] = found = step, where
    return found[0]
