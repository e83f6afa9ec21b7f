"""A model call over transformers' own KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from accelpatch.fusion.call import Movable, run_module
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.module_cache import ModuleCache
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention.prompt_attention import (
    Shown,
    attend,
    attend_by_torch,
    module_mask,
    rotate_,
    rotate_by_tables_,
    shown,
)
from accelpatch.kernels.ops.attention.rope import rotary_cos_sin


@dataclass(eq=False)
class CacheCall(Movable):
    """A call of L tokens a row. positions[B, L]; mask[B, past + L] or None; cache: None for none; past: cached tokens.
    blind: whether results of tokens that see no key are returned to the caller; attention then runs by the functions
    that transformers calls, whose results for such tokens differ. axes[3, B, L]: positions that differ by axis, as for
    the tokens of a picture; axis[R / 2]: the axis of each frequency. masks: whether a layer has a window -> boolean [B
    or 1, 1, L, past + L] of visible keys, where tokens see more than those before them, as within a picture.
    """

    decoder: Any
    positions: Tensor
    mask: Tensor | None
    cache: Any
    past: int
    blind: bool = False
    axes: Tensor | None = None
    axis: Tensor | None = None
    masks: Mapping[bool, Tensor] | None = None

    def __post_init__(self) -> None:
        self._seen: dict[tuple[int, int], Shown] = {}
        self._tables: tuple[Tensor, Tensor] | None = None

    def form(self, layer: Any) -> Any:
        """As in Call."""
        return layer.without_signals

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call; qkv is overwritten."""
        shape: AttentionShape = layer.attention
        batch, length = self.positions.shape
        first = self.first(place)
        new = qkv.new_empty(2, batch, shape.kv_heads, length, shape.size)
        if self.axes is None:
            rotate_(qkv, self.positions, new[0], new[1], shape)
        else:
            rotate_by_tables_(qkv, *self._by_axes(shape, qkv.dtype), new[0], new[1], shape)
        given = qkv, self.positions, self.seen(first, shape.window), *self.cached(new, place), shape
        if self.blind:
            attention = LayerDescription(layers_of(self.decoder)[place]).attention
            return attend_by_torch(*given, eager=attention is not None and attention.eager)
        return attend(*given)

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        length, first = self.positions.shape[1], self.first(place)
        keys = self.past + length - first

        def visible(window: int) -> Tensor:
            return module_mask(self.seen(first, window), length, keys, x, self.blind)

        return run_module(self.decoder, place, x, self.positions, visible, self.module_cache(place), self.axes)

    def _by_axes(self, shape: AttentionShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, L, R], each column from the positions of its frequency's axis; all layers share
        them."""
        if self._tables is None:
            assert self.axes is not None
            assert self.axis is not None
            tables = rotary_cos_sin(self.axes, shape.inv_freq, shape.rope_scaling, dtype)
            pick = self.axis.to(self.axes.device).repeat(2)[:, None]
            apart = (one.movedim(0, -1) for one in tables)
            cos, sin = (one.gather(-1, pick.expand(*one.shape[:-1], 1))[..., 0] for one in apart)
            self._tables = cos, sin
        return self._tables

    def module_cache(self, place: int) -> Any:
        """The cache that the module of the layer at `place` fills."""
        return self.cache

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer after appending new[2, B, Hkv, L, D]; an empty layer keeps `new` without a
        copy."""
        k, v = new[0], new[1]
        if self.cache is None:
            return k, v
        layer: Any = self.cache.layers[place] if place < len(self.cache.layers) else None
        if type(layer) is DynamicLayer and not layer.is_initialized:
            layer.dtype, layer.device, layer.is_initialized = k.dtype, k.device, True
            layer.keys, layer.values = k, v
            return k, v
        return self.cache.update(k, v, place)

    def first(self, place: int) -> int:
        """Index in the sequence of the first key that a layer attends to."""
        if self.cache is None or place >= len(self.cache.layers):
            return 0
        return int(self.cache.layers[place].get_mask_sizes(self.positions.shape[1])[1])

    def seen(self, first: int, window: int) -> Shown:
        """Which of the keys from index `first` on each token sees, in layers with this window."""
        key = first, window
        if key not in self._seen and self.masks is not None:
            seen = self.masks[window > 0][..., first:].to(self.positions.device)
            self._seen[key] = Shown(bias=seen.contiguous(), causal=False)
        if key not in self._seen:
            mask = None if self.mask is None else self.mask[:, first:]
            self._seen[key] = shown(mask, self.past - first, self.positions.shape[1], window)
        return self._seen[key]


class KeptCall(CacheCall):
    """The call of a captured short prompt, which leaves the new keys and values in the graph's tensors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[Tensor] = []

    def cached(self, new: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in CacheCall, for an empty cache."""
        self.kept.append(new)
        return new[0], new[1]

    def module_cache(self, place: int) -> Any:
        """As in CacheCall."""
        return _Kept(self, place)


class _Kept(ModuleCache):
    """The cache of a KeptCall, as a layer's module uses it."""

    def __init__(self, call: KeptCall, place: int):
        super().__init__(len(layers_of(call.decoder)), place, 0, call.positions.shape[1])
        self._call = call

    def write(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        return self._call.cached(torch.stack((keys, values)), place)

    def states(self, place: int) -> tuple[Tensor | None, Tensor | None]:
        """As in ModuleCache."""
        kept = self._call.kept
        return (kept[place][0], kept[place][1]) if place < len(kept) else (None, None)
