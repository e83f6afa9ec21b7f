"""The KV buffers of native steps behind transformers' own cache object.

A step writes into one buffer per layer; `cache.layers[i].keys` is a view of its filled part. Assigning new keys to a
layer (a chunk of several tokens, beam search, cropping) detaches it, and the next step copies it back in: the cache
keeps transformers' semantics, and plain decoding copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from accelpatch.kernels.cpu.native_library import PLAIN

ROOM = 256  # free slots in tokens that a new store has at least; it doubles when full


class Store:
    """keys, values: of each layer [B, Hkv, capacity, D] float32, filled up to `length` tokens; and the native step.

    like: keys and values of each layer, [B, Hkv, any, D], whose shapes the store's have.
    """

    def __init__(self, like: Iterable[tuple[Tensor, Tensor]], capacity: int):
        pairs = [(_room(keys, capacity), _room(values, capacity)) for keys, values in like]
        self.keys, self.values = (list(one) for one in zip(*pairs, strict=True))
        self.capacity = capacity
        self.length = 0
        self.step: Any = None
        self.made_by: Any = None
        self.places: Any = None  # slots, starts and positions of the last step, if no layer ran as a module
        self.ahead: int | None = None  # in a step that runs modules: layers before this one have its token already

    def held(self, index: int) -> int:
        """Number of tokens that a layer has by now."""
        return self.length + (self.ahead is not None and index < self.ahead)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the step, which holds pointers and the model's weights, so that a cache can be saved."""
        return vars(self) | {"step": None, "made_by": None, "places": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        copied = Store(zip(self.keys, self.values, strict=True), self.capacity)
        memo[id(self)] = copied
        for mine, its in zip((*copied.keys, *copied.values), (*self.keys, *self.values), strict=True):
            mine.copy_(its)
        copied.length = self.length
        return copied


def _room(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, size = states.shape
    return torch.zeros(batch, heads, capacity, size, **PLAIN)


class StoreLayer(DynamicLayer):
    """A layer of transformers' cache whose keys and values are views of a store, until they are assigned."""

    def __init__(self, store: Store, index: int):
        self._store: Store | None = None
        self._own: list[Any] = [None, None]  # keys and values that were assigned
        super().__init__()
        self.dtype, self.device = store.keys[index].dtype, store.keys[index].device
        self.is_initialized = True
        self._index = index
        self._store = store

    @property
    def keys(self) -> Any:
        """[B, Hkv, length, D]; a view of the store while attached."""
        return self._own[0] if self._store is None else self._filled(self._store.keys)

    @keys.setter
    def keys(self, value: Any) -> None:
        self._detach(0, value)

    @property
    def values(self) -> Any:
        """[B, Hkv, length, D]; a view of the store while attached."""
        return self._own[1] if self._store is None else self._filled(self._store.values)

    @values.setter
    def values(self, value: Any) -> None:
        self._detach(1, value)

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        return self._store.held(self._index) if self._store is not None else super().get_seq_length()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens [B, Hkv, L, D]; during a step, write its one token in place."""
        store = self._store
        if store is None or store.ahead is None:
            grown: tuple[Any, Any] = super().update(key_states, value_states, *args, **kwargs)
            return grown
        buffers, end = (store.keys[self._index], store.values[self._index]), store.length + 1
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, store.length : end] = states
        store.ahead = self._index + 1
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def _filled(self, buffers: list[Tensor]) -> Tensor:
        assert self._store is not None
        return buffers[self._index][:, :, : self._store.held(self._index)]

    def _detach(self, which: int, value: Any) -> None:
        if self._store is not None:
            # the other one still shows what the store holds now; it must not change under its reader
            pair = [self._filled(self._store.keys), self._filled(self._store.values)]
            pair[1 - which] = pair[1 - which].clone()
            self._own, self._store = pair, None
        self._own[which] = value


LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StoreLayer)


def stored(cache: Any) -> Store | None:
    """The store to which all layers of `cache` are attached, or None."""
    layers = cache.layers
    store: Store | None = getattr(layers[0], "_store", None)
    return store if store is not None and all(getattr(one, "_store", None) is store for one in layers) else None


def attach(cache: DynamicCache, batch: int) -> Store | str:
    """The store behind `cache`, created or refreshed from its layers; or the reason why there can be none."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or not cache.layers:
        return f"the cache is a {type(cache).__name__}"
    if (store := stored(cache)) is not None:
        if store.keys[0].shape[0] != batch:
            return f"the cache has {store.keys[0].shape[0]} sequences, and {batch} were given"
        if store.keys[0].is_inference() and not torch.is_inference_mode_enabled():
            return _copied(cache, ROOM)  # what was made in inference mode can be written there alone
        return store if store.length < store.capacity else _copied(cache, store.length)
    for layer in cache.layers:
        if type(layer) not in LAYERS or not layer.is_initialized or getattr(layer, "record_past", False):
            return f"a layer of the cache is a {type(layer).__name__}"
        if layer.keys.shape[0] != batch or layer.keys.dtype != torch.float32 or layer.keys.device.type != "cpu":
            return f"the cache holds {layer.keys.dtype} keys of batch {layer.keys.shape[0]}"
    return _copied(cache, ROOM)


def _copied(cache: DynamicCache, room: int) -> Store:
    """A new store with the layers' tokens. Of a sliding-window layer only the last, visible tokens exist."""
    length = cache.get_seq_length()
    store = Store(((layer.keys, layer.values) for layer in cache.layers), length + room)
    for keys, values, layer in zip(store.keys, store.values, cache.layers, strict=True):
        held = layer.keys.shape[2]
        keys[:, :, length - held : length] = layer.keys
        values[:, :, length - held : length] = layer.values
    store.length = length
    cache.layers = [StoreLayer(store, index) for index in range(len(cache.layers))]
    return store
