"""Calls over a static KV cache, whose tensors stay at fixed addresses: decode steps and prompts of captured graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.call import Movable, is_whole, run_module
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.module_cache import ModuleCache
from accelpatch.kernels.layouts.kv_states import floats
from accelpatch.kernels.ops.attention.decode_attention import decode_attention_
from accelpatch.kernels.ops.attention.prompt_attention import Shown, module_mask, prompt_attention_, shown


@dataclass(eq=False)
class StepCall(Movable):
    """A decode step of T tokens a row, cached from slot[B] on; positions[B, T], mask[B, capacity] of earlier slots."""

    decoder: Any
    cache: Any
    positions: Tensor
    slot: Tensor
    mask: Tensor
    _seen: dict[int, Tensor] = field(default_factory=dict, init=False)

    def form(self, layer: Any) -> Any:
        """As in Call. Attention of several tokens waits for the whole of q, k and v."""
        return layer if self.positions.shape[1] == 1 else layer.without_attention_signal

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call."""
        held = self.cache.layers[place]
        return decode_attention_(
            qkv, self.positions, self.slot, self.mask, held.keys, held.values, layer.attention, layer.o.weight.w,
            layer.attention_signal,
        )  # fmt: skip

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        own = self.slot[:, None] + torch.arange(self.positions.shape[1], device=x.device)

        def visible(window: int) -> Tensor:
            if window not in self._seen:
                at = torch.arange(self.mask.shape[1], device=x.device)
                seen = at <= own[:, :, None]
                if window:
                    seen = seen & (at > own[:, :, None] - window)
                self._seen[window] = (seen & (self.mask.ne(0) | (at >= self.slot[:, None]))[:, None])[:, None]
            return self._seen[window]

        return run_module(self.decoder, place, x, self.positions, visible, _Slots(self.cache, place, own))


@dataclass(eq=False)
class PromptCall(Movable):
    """A prompt of L tokens a row, or a part of one, into the slots from `start` on, where the cache holds all tokens
    before; positions[B, L], mask[B, start + L] or None."""

    decoder: Any
    cache: Any
    positions: Tensor
    mask: Tensor | None
    start: int = 0
    _seen: dict[int, Shown] = field(default_factory=dict, init=False)
    _shown: dict[tuple[int, bool], Tensor | None] = field(default_factory=dict, init=False)  # to modules

    def seen(self, window: int) -> Shown:
        """What each token sees in layers with a window."""
        if window not in self._seen:
            self._seen[window] = shown(self.mask, self.start, self.positions.shape[1], window)
        return self._seen[window]

    def form(self, layer: Any) -> Any:
        """As in Call."""
        return layer.without_signals

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call."""
        held, seen = self.cache.layers[place], self.seen(layer.attention.window)
        return prompt_attention_(qkv, self.positions, seen, held.keys, held.values, layer.attention, self.start)

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        length, whole = self.positions.shape[1], is_whole(layers_of(self.decoder)[place])
        keys = self.start + length
        plain = whole and self.mask is None and not self.start

        def visible(window: int) -> Tensor | None:
            key = window, plain and not 0 < window < keys
            if key not in self._shown:
                self._shown[key] = None if key[1] else module_mask(self.seen(window), length, keys, x)
            return self._shown[key]

        return run_module(self.decoder, place, x, self.positions, visible, _Next(self.cache, place, self.start, length))


class _Slots(ModuleCache):
    """What a layer's module sees of the cache in a step: it writes the slots own[B, T] and attends over all."""

    def __init__(self, cache: Any, place: int, own: Tensor):
        super().__init__(len(cache.layers), place, own[0, 0], own.shape[1])
        self._cache, self._own = cache, own
        self._rows = torch.arange(own.shape[0], device=own.device)[:, None]

    @property
    def capacity(self) -> int:
        """Slots of each layer."""
        return int(self._cache.layers[self.place].keys.shape[2])

    def write(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        held = self._cache.layers[place]
        held.keys[self._rows, :, self._own] = keys.transpose(1, 2)
        held.values[self._rows, :, self._own] = values.transpose(1, 2)
        return self.states(place)

    def states(self, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        return floats(self._cache.layers[place].keys), floats(self._cache.layers[place].values)


class _Next(ModuleCache):
    """What a layer's module sees of the cache in a prompt: it fills `length` slots, and attends over all up to them."""

    def __init__(self, cache: Any, place: int, start: int, length: int):
        super().__init__(len(cache.layers), place, start, length)
        self._cache = cache

    def write(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        held, end = self._cache.layers[place], self.start + self.length
        held.keys[:, :, self.start : end] = keys
        held.values[:, :, self.start : end] = values
        own = self.start == 0 and isinstance(held.keys, Tensor)  # else it attends to what the cache makes of them
        return (keys, values) if own else (held.keys[:, :, :end], held.values[:, :, :end])

    def states(self, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        held, end = self._cache.layers[place], self.held(place)
        return held.keys[:, :, :end], held.values[:, :, :end]
