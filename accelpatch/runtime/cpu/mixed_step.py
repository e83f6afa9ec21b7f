"""A native step in which some layers run as modules: those with hooks, and those that are not fused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_call import CacheCall
from accelpatch.fusion.decoder import layers_of, module_in
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import PLAIN
from accelpatch.runtime.cache_contents import Contents
from accelpatch.runtime.cpu.torch_threads import all_threads

Places = tuple[Tensor, Tensor, Tensor]


def mixed_step(
    model: Any, step: DecodeStep, contents: Contents, cache: Any, tokens: Tensor, places: Places,
    watched: Collection[int],
) -> Tensor:  # fmt: skip
    """Logits [B, V] after `tokens`[B], which the cache has by then. watched: indices of the layers that run as modules,
    over the caller's own cache."""
    hidden = torch.empty(tokens.shape[0], step.shape.hidden, **PLAIN)
    decoder = module_in(model)
    layers, begin, call = layers_of(decoder), 0, _call(decoder, cache, places, contents.length)
    with all_threads():
        for place in sorted(watched):
            if begin < place or place == 0:  # at place 0: the embedding alone; nothing between neighbours
                step.part(tokens, *places, range(begin, place), hidden)
            with contents.module(place):
                hidden.copy_(call.by_module(hidden.clone(), place))
            begin = place + 1
        logits = step.part(tokens, *places, range(begin, len(layers)), hidden)
    contents.grow()
    assert logits is not None
    return logits


def _call(decoder: Any, cache: Any, places: Places, past: int) -> CacheCall:
    """The step as a call over the caller's cache, for its modules."""
    _, starts, positions = places
    mask = torch.arange(past + 1, device="cpu") >= starts[:, None] if starts.any() else None
    return CacheCall(decoder, positions[:, None], mask, cache, past)
