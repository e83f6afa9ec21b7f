"""What the fused layers of one call share: its positions, what each token sees, and the cache of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.prompt_attention import rotate_
from accelpatch.runtime import attention_facts
from accelpatch.runtime.native_weights import layer_type


@dataclass(eq=False)
class Call:
    """What the layers of one call share. positions[B, L]; mask[B, past + L] or None; past: tokens cached before."""

    positions: Tensor
    mask: Tensor | None
    cache: Any
    past: int

    def __post_init__(self) -> None:
        self._seen: dict[tuple[int, int, int], Tensor | None] = {}

    def attend(self, qkv: Tensor, shape: AttentionShape, place: int) -> Tensor:
        """y[B L, Hq D] of qkv[B L, (Hq + 2 Hkv) D], which is written to; keys and values go into the cache."""
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
        """All keys and values of a layer, with these new[2, B, Hkv, L, D], which an empty layer takes as they are."""
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
        """The place in the text of the first key that a layer will see."""
        if self.cache is None or place >= len(self.cache.layers):
            return 0
        return int(self.cache.layers[place].get_mask_sizes(self.positions.shape[1])[1])

    def seen(self, keys: int, first: int, window: int) -> Tensor | None:
        """[B or 1, 1, L, keys]: which keys each token sees; None where it is all of those up to itself."""
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
    """A call of a short prompt, which keeps keys and values where a graph leaves them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[Tensor] = []

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As Call's, of an empty cache."""
        self.kept.append(new)
        return new[0], new[1]


def by_module(decoder: Any, place: int, stream: Tensor, call: Call) -> Tensor:
    """A layer's own call: stream[B, L, K] -> [B L, K]."""
    layer, length = decoder.layers[place], stream.shape[1]
    attention = layer.self_attn
    kinds = () if hasattr(decoder.rotary_emb, "inv_freq") else (layer_type(layer),)
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
