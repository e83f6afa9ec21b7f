"""A native step in which some layers run as modules: those with hooks, and those that are not fused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.call import run_module
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import PLAIN
from accelpatch.runtime.cpu.native_cache import Store
from accelpatch.runtime.cpu.torch_threads import all_threads

Places = tuple[Tensor, Tensor, Tensor]


def mixed_step(
    model: Any, step: DecodeStep, store: Store, cache: Any, tokens: Tensor, places: Places, watched: Collection[int]
) -> Tensor:
    """Logits [B, V] after `tokens`[B]. watched: indices of the layers that run as modules. The store's length stays."""
    hidden = torch.empty(tokens.shape[0], step.shape.hidden, **PLAIN)
    layers, begin = model.model.layers, 0
    try:
        with all_threads():
            for place in sorted(watched):
                if begin < place or place == 0:  # at place 0: the embedding alone; nothing between neighbours
                    step.part(tokens, *places, range(begin, place), hidden)
                store.ahead = place
                hidden.copy_(_module(model.model, place, hidden, cache, places, store.length + 1))
                begin = place + 1
            logits = step.part(tokens, *places, range(begin, len(layers)), hidden)
    finally:
        store.ahead = None
    assert logits is not None
    return logits


def _module(decoder: Any, place: int, hidden: Tensor, cache: Any, places: Places, length: int) -> Tensor:
    """Run a layer's module for one token a row: hidden[B, K] -> [B, K]."""
    slots, starts, positions = (one.unsqueeze(1) for one in places)

    def visible(window: int) -> Tensor:
        first = torch.maximum(starts, slots - window + 1) if window else starts
        return (torch.arange(length, device="cpu") >= first)[:, None, None]

    return run_module(decoder, place, hidden.clone(), positions, visible, cache)
