"""A view of our KV caches, for one call, with the interface that a layer's module expects of transformers' caches."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from accelpatch.kernels.layouts.kv_states import floats


class ModuleCache(Cache):
    """The cache of a call that runs the module of the layer at `place`.

    count: number of layers. start: tokens before the call, a number or a tensor on the device. length: tokens of the
    call, which the layers before `place` have already, and those after it have not; `place` itself from its update on.
    """

    layer_class_to_replicate = None
    offloading = False

    def __init__(self, count: int, place: int, start: Any, length: int):
        # Cache.__init__ is not called, since it needs the layers; few modules use more than `update`
        self.count, self.place, self.start, self.length = count, place, start, length
        self._filled = place  # layers before it have the tokens of the call

    @cached_property
    def layers(self) -> list[Any]:
        """One for each layer of the model."""
        return [ModuleLayer(self, place) for place in range(self.count)]

    def update(self, keys: Tensor, values: Tensor, place: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the states [B, Hkv, T, D] of the call's tokens; returns all that the module attends to."""
        made = self.write(keys, values, place)
        self._filled = max(self._filled, place + 1)
        return made

    def length_of(self, place: int) -> Any:
        """Number of tokens that a layer has at this point of the call."""
        return self.start + self.length if place < self._filled else self.start

    @property
    def capacity(self) -> int | None:
        """Slots of each layer, all of which are attended to; None where there are as many as tokens."""
        return None

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As `update`."""

    @abstractmethod
    def states(self, place: int) -> tuple[Tensor | None, Tensor | None]:
        """The present keys and values of a layer; None for one that has none yet."""


class ModuleLayer(CacheLayerMixin):
    """A layer of a ModuleCache."""

    is_sliding = False
    is_initialized = True

    def __init__(self, cache: ModuleCache, place: int):
        self._cache, self._place = cache, place

    @property
    def keys(self) -> Tensor | None:
        """The present keys, [B, Hkv, S, D]."""
        return self._cache.states(self._place)[0]

    @property
    def values(self) -> Tensor | None:
        """As keys."""
        return self._cache.states(self._place)[1]

    @property
    def is_compileable(self) -> bool:
        """Whether the tensors stay where they are."""
        return self._cache.capacity is not None

    def lazy_initialization(self, *states: Any) -> None:
        """Does nothing: the cache has its tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As of the cache."""
        return self._cache.update(key_states, value_states, self._place)

    def get_seq_length(self) -> Any:
        """Present number of tokens, an int or a tensor on the device."""
        return self._cache.length_of(self._place)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a mask covers, index of the first)."""
        capacity = self._cache.capacity
        return (self.get_seq_length() + query_length if capacity is None else capacity), 0

    def get_max_length(self) -> int:
        """Capacity in tokens; -1 for none."""
        return -1 if self._cache.capacity is None else self._cache.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class StepSlots(ModuleCache):
    """The cache in a decode step: a module writes the slots own[B, T] and attends over all."""

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
        layer = self._cache.layers[place]
        layer.keys[self._rows, :, self._own] = keys.transpose(1, 2)
        layer.values[self._rows, :, self._own] = values.transpose(1, 2)
        return self.states(place)

    def states(self, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        return floats(self._cache.layers[place].keys), floats(self._cache.layers[place].values)


class PromptSlots(ModuleCache):
    """The cache in a prompt: a module writes `length` slots, and attends over all slots up to these."""

    def __init__(self, cache: Any, place: int, start: int, length: int):
        super().__init__(len(cache.layers), place, start, length)
        self._cache = cache

    def write(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        layer, end = self._cache.layers[place], self.start + self.length
        layer.keys[:, :, self.start : end] = keys
        layer.values[:, :, self.start : end] = values
        # Else it attends to the states as the cache has rounded them.
        own = self.start == 0 and isinstance(layer.keys, Tensor)
        return (keys, values) if own else (layer.keys[:, :, :end], layer.values[:, :, :end])

    def states(self, place: int) -> tuple[Tensor, Tensor]:
        """As in ModuleCache."""
        layer, end = self._cache.layers[place], self.length_of(place)
        return layer.keys[:, :, :end], layer.values[:, :, :end]
