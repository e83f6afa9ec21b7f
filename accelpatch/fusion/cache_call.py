"""A model call over transformers' own KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from accelpatch.fusion.call import run_module
from accelpatch.kernels.ops.attention_shape import AttentionShape
from accelpatch.kernels.ops.prompt_attention import rotate_


@dataclass(eq=False)
class CacheCall:
    """A call of L tokens a row. positions[B, L]; mask[B, past + L] or None; cache: None for none; past: cached
    tokens."""

    decoder: Any
    positions: Tensor
    mask: Tensor | None
    cache: Any
    past: int

    def __post_init__(self) -> None:
        self._seen: dict[tuple[int, int, int], Tensor | None] = {}

    def on(self, device: torch.device) -> CacheCall:
        """As in Call."""
        if self.positions.device == device:
            return self
        mask = None if self.mask is None else self.mask.to(device)
        return CacheCall(self.decoder, self.positions.to(device), mask, self.cache, self.past)

    def form(self, layer: Any) -> Any:
        """As in Call."""
        return layer.without_signals

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call; qkv is overwritten."""
        shape: AttentionShape = layer.attention
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

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        length, first = self.positions.shape[1], self.first(place)
        keys = self.past + length - first

        def shown(window: int) -> Tensor:
            seen = self.seen(keys, first, window)
            if seen is None:
                seen = torch.ones(length, keys, dtype=torch.bool, device=x.device).tril(keys - length)[None, None]
            return seen

        return run_module(self.decoder, place, x, self.positions, shown, self.module_cache)

    @property
    def module_cache(self) -> Any:
        """The cache that a layer's module fills."""
        return self.cache

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


class KeptCall(CacheCall):
    """The call of a captured short prompt; it keeps the new keys and values in the graph's tensors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[Tensor] = []

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in CacheCall, for an empty cache."""
        self.kept.append(new)
        return new[0], new[1]

    @property
    def module_cache(self) -> Any:
        """As in CacheCall."""
        return self

    def update(self, keys: Tensor, values: Tensor, place: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What a layer's module calls of a cache."""
        return self.cached(torch.stack((keys, values)), place)
