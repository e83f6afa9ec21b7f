"""A native step in which layers with hooks run as modules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.fusion import attention_facts
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import PLAIN
from accelpatch.kernels.ops import linear
from accelpatch.runtime.cpu.native_cache import Store
from accelpatch.runtime.cpu.torch_threads import all_threads

Places = tuple[Tensor, Tensor, Tensor]


def mixed_step(
    model: Any, step: DecodeStep, store: Store, cache: Any, tokens: Tensor, places: Places, watched: Collection[int]
) -> Tensor:
    """Logits [B, V] after `tokens`[B]. watched: indices of the layers that run as modules. The store's length stays."""
    hidden = torch.empty(tokens.shape[0], step.shape.hidden, **PLAIN)
    layers, begin = model.model.layers, 0
    store.open = True
    try:
        with all_threads():
            for place in sorted(watched):
                if begin < place or place == 0:  # at place 0: the embedding alone; nothing between neighbours
                    step.part(tokens, *places, range(begin, place), hidden)
                given = _module(model.model, layers[place], hidden, cache, places, store.length + 1)
                if not isinstance(given, Tensor) or given.shape != (tokens.shape[0], 1, step.shape.hidden):
                    raise KernelError(
                        f"layer {place} gave {linear.say(given) if isinstance(given, Tensor) else type(given).__name__}"
                        f" and not [{tokens.shape[0]}, 1, {step.shape.hidden}]: look at its hooks"
                    )
                hidden.copy_(given[:, 0])
                begin = place + 1
            logits = step.part(tokens, *places, range(begin, len(layers)), hidden)
    finally:
        store.open = False
    assert logits is not None
    return logits


def _module(decoder: Any, layer: Any, hidden: Tensor, cache: Any, places: Places, length: int) -> Any:
    """Run a layer's module for one token: hidden[B, K] -> [B, 1, K]."""
    slots, starts, positions = places
    stream, position_ids = hidden.unsqueeze(1).clone(), positions.unsqueeze(1)
    kinds = attention_facts.rope_arguments(decoder.rotary_emb, layer.self_attn)
    given = {
        "attention_mask": _mask(slots, starts, attention_facts.window(layer.self_attn), length),
        "position_ids": position_ids,
        "past_key_values": cache,
        "use_cache": True,
        "position_embeddings": decoder.rotary_emb(stream, position_ids, *kinds),
    }
    return layer(stream, **given)


def _mask(slots: Tensor, starts: Tensor, window: int, length: int) -> Tensor | None:
    """Additive mask [B, 1, 1, length]: 0 for visible slots, else the lowest number; None where all are visible."""
    first = torch.maximum(starts, slots - window + 1) if window else starts
    if not bool(first.any()):
        return None
    hidden = torch.arange(length, device="cpu") < first[:, None]
    return torch.zeros(hidden.shape, **PLAIN).masked_fill_(hidden, torch.finfo(torch.float32).min)[:, None, None]
