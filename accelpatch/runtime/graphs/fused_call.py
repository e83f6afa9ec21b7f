"""State that the fused layers of one model call share: positions, masks, and transformers' KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from accelpatch.fusion import attention_facts
from accelpatch.kernels.ops.attention_shape import AttentionShape
from accelpatch.kernels.ops.prompt_attention import rotate_


@dataclass(eq=False)
class Call:
    """One model call over transformers' cache. positions[B, L]; mask[B, past + L] or None; past: cached tokens."""

    positions: Tensor
    mask: Tensor | None
    cache: Any
    past: int

    def __post_init__(self) -> None:
        self._seen: dict[tuple[int, int, int], Tensor | None] = {}

    def attend(self, qkv: Tensor, shape: AttentionShape, place: int) -> Tensor:
        """Attention of layer `place`: qkv[B L, (Hq + 2 Hkv) D] (overwritten) -> y[B L, Hq D]. Updates the cache."""
        batch, length = self.positions.shape
        first = self.first(place)
        new = qkv.new_empty(2, batch, shape.kv_heads, length, shape.size)
        rotate_(qkv, self.positions, new[0], new[1], shape)
        k, v = self.cached(new, place)
        q = qkv.view(batch, length, -1, shape.size)[:, :, : shape.heads].transpose(1, 2)
        seen, group = self.seen(k.shape[2], first, shape.window), shape.heads // shape.kv_heads
        if seen is not None and group > 1:  # no fast form of torch's takes both a mask and groups
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None and length > 1, scale=shape.scaling, enable_gqa=group > 1
        )
        return y.transpose(1, 2).reshape(batch * length, -1)

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer after appending new[2, B, Hkv, L, D], which an empty layer takes uncopied."""
        k, v = new[0], new[1]
        if self.cache is None:
            return k, v
        layer: Any = self.cache.layers[place] if place < len(self.cache.layers) else None
        if type(layer) is DynamicLayer and not layer.is_initialized:
            layer.dtype, layer.device, layer.is_initialized = k.dtype, k.device, True
            layer.keys, layer.values = k, v
            return k, v
        both: tuple[Tensor, Tensor] = self.cache.update(k, v, place)
        return both

    def first(self, place: int) -> int:
        """Index in the sequence of the first key that a layer attends to."""
        if self.cache is None or place >= len(self.cache.layers):
            return 0
        return int(self.cache.layers[place].get_mask_sizes(self.positions.shape[1])[1])

    def seen(self, keys: int, first: int, window: int) -> Tensor | None:
        """Boolean mask [B or 1, 1, L, keys] of the keys that each token attends to; None for plain causal masking."""
        key = keys, first, window
        if key not in self._seen:
            self._seen[key] = self._make(keys, first, window)
        return self._seen[key]

    def _make(self, keys: int, first: int, window: int) -> Tensor | None:
        length = self.positions.shape[1]
        far = 0 < window < self.past + length - first
        if self.mask is None and not far and (length == 1 or self.past == 0):
            return None
        device = self.positions.device
        at = torch.arange(self.past, self.past + length, device=device)[:, None]
        key = torch.arange(first, first + keys, device=device)
        seen = key <= at
        if window:
            seen = seen & (at - key < window)
        if self.mask is not None:
            seen = seen & self.mask[:, None, first : first + keys].ne(0)
        return seen.view(-1, 1, length, keys)


class KeptCall(Call):
    """The call of a captured short prompt; it keeps the new keys and values in the graph's tensors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[Tensor] = []

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in Call, for an empty cache."""
        self.kept.append(new)
        return new[0], new[1]


def by_module(decoder: Any, place: int, stream: Tensor, call: Call) -> Tensor:
    """Run a layer's own module: stream[B, L, K] -> [B L, K]."""
    layer, length = decoder.layers[place], stream.shape[1]
    attention = layer.self_attn
    kinds = attention_facts.rope_arguments(decoder.rotary_emb, attention)
    first = call.first(place)
    seen = call.seen(call.past + length - first, first, attention_facts.window(attention))
    if seen is None and length > 1:
        seen = torch.ones(length, length, dtype=torch.bool, device=stream.device).tril()[None, None]
    if seen is not None and attention.config._attn_implementation == "eager":
        seen = torch.zeros_like(seen, dtype=stream.dtype).masked_fill_(~seen, torch.finfo(stream.dtype).min)
    given = {
        "attention_mask": seen, "position_ids": call.positions, "past_key_values": call.cache,
        "use_cache": call.cache is not None, "position_embeddings": decoder.rotary_emb(stream, call.positions, *kinds),
    }  # fmt: skip
    made = layer(stream, **given)
    return (made if isinstance(made, Tensor) else made[0]).flatten(0, 1)
