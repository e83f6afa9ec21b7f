"""Moves the contents of transformers' KV cache into a captured step's static cache and back.

`attach` leaves the cache usable: its layers say how many tokens they hold, and are reordered (beam search) where the
tokens lie. Whatever else touches keys or values gets tensors of its own back first, for all layers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

OWN_CACHE = "_accelpatch_own"  # attribute of a cache: whether generate() made it for the call that runs


class Contents:
    """The first `length` tokens of a static cache, which belong to the layers of one of transformers' caches."""

    def __init__(self, layers: list[Any], static: Cache, length: int):
        self.static, self.length = static, length
        self._layers = layers
        self._lock = threading.Lock()
        for place, layer in enumerate(layers):
            del layer.keys, layer.values
            layer.__dict__.pop("cumulative_length", None)
            layer.__class__ = ATTACHED[type(layer)]
            layer._contents, layer._place = self, place

    def detach(self) -> None:
        """Give every layer copies of its tokens, and its class back. Does nothing where that was done."""
        with self._lock, torch.no_grad():
            if not self._layers:
                return
            copies = [_tokens(layer, held, self.length) for layer, held in self._pairs()]
            for layer, (keys, values) in zip(self._layers, copies, strict=True):
                layer.__class__ = DETACHED[type(layer)]
                del layer._contents, layer._place
                layer.keys, layer.values = keys, values
                if type(layer) is DynamicSlidingWindowLayer:
                    layer.cumulative_length = self.length
            self._layers = []
            for device in {keys.device for keys, _ in copies if keys.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # the static cache's next user may use another stream

    def reorder(self, place: int, rows: Tensor) -> bool:
        """Row b of a layer becomes its row rows[b], int64. Returns False where the layers were detached meanwhile."""
        held = self.static.layers[place]
        with self._lock, torch.no_grad():
            for tensor in (held.keys, held.values) if self._layers else ():
                filled = tensor[:, :, : self.length]
                filled.copy_(filled.index_select(0, rows.to(tensor.device)))
            return bool(self._layers)

    def grow(self, cache: Any) -> None:
        """One more token was written behind the others. A cache whose layers were detached meanwhile (by a hook that
        reads it) gets a copy of the token."""
        with self._lock, torch.no_grad():
            if self._layers:
                self.length += 1
                return
            for layer, held in zip(cache.layers, self.static.layers, strict=True):
                token = slice(self.length, self.length + 1)
                layer.update(held.keys[:, :, token].clone(), held.values[:, :, token].clone())

    def _pairs(self) -> Any:
        return zip(self._layers, self.static.layers, strict=True)


class _Attached:
    """What a layer of transformers' cache has in place of its own while its tokens lie in a static cache."""

    _contents: Contents
    _place: int

    @property
    def keys(self) -> Any:
        """Detaches; then the layer's own tensor."""
        self._contents.detach()
        return self.keys  # of the layer's own class by now

    @keys.setter
    def keys(self, value: Any) -> None:
        self._contents.detach()
        self.keys = value

    @property
    def values(self) -> Any:
        """As keys."""
        self._contents.detach()
        return self.values

    @values.setter
    def values(self, value: Any) -> None:
        self._contents.detach()
        self.values = value

    @property
    def cumulative_length(self) -> int:
        """Number of tokens so far, of a layer with a sliding window."""
        return self._contents.length

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        self._contents.detach()
        self.cumulative_length = value

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        return self._contents.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows in place, as beam search does."""
        same = len(beam_idx) == len(self._contents.static.layers[self._place].keys)
        if not (same and self._contents.reorder(self._place, beam_idx)):
            self._contents.detach()
            self.reorder_cache(beam_idx)  # of the layer's own class by now

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._contents.detach()
        return self.__reduce_ex__(protocol)


def _attached(plain: type) -> type:
    """The class of an attached layer. No second base: an object's class changes only to one of equal layout."""
    body = {name: value for name, value in vars(_Attached).items() if name not in ("__dict__", "__weakref__")}
    return type(plain)(plain.__name__, (plain,), body)


ATTACHED = {plain: _attached(plain) for plain in (DynamicLayer, DynamicSlidingWindowLayer)}
DETACHED = {attached: plain for plain, attached in ATTACHED.items()}


def attached(cache: Any) -> Contents | None:
    """The contents of `cache` that lie in a static cache; None where it holds its tokens itself."""
    return getattr(cache.layers[0], "_contents", None) if cache.layers else None


def attach(cache: Any, static: Cache) -> Contents:
    """Move the contents of `cache`, for which `why_not` has no reason, into `static`, and leave them there."""
    length = move_in(cache, static)
    return Contents(list(cache.layers), static, length)


def why_not(cache: Any) -> str | None:
    """Why a static cache cannot replace this one; None where it can."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__}"
    for layer in cache.layers:
        if (type(layer) not in ATTACHED and type(layer) not in DETACHED) or getattr(layer, "record_past", False):
            return f"a layer of the cache is a {type(layer).__name__}"
    return None


def move_in(cache: Any, static: Cache) -> int:
    """Move the contents of a dynamic cache into a static one; returns the number of tokens.

    Of a sliding-window layer only the last tokens exist; the window hides all earlier ones.
    """
    length = int(cache.get_seq_length())
    for layer, held in zip(cache.layers, static.layers, strict=True):
        first = length - layer.keys.shape[2]
        held.keys[:, :, first:length].copy_(layer.keys)
        held.values[:, :, first:length].copy_(layer.values)
        layer.keys, layer.values = layer.keys.new_empty(0), layer.values.new_empty(0)
    return length


def move_back(static: Cache, cache: Any, length: int) -> None:
    """Give a dynamic cache copies of the first `length` tokens of a static one."""
    for layer, held in zip(cache.layers, static.layers, strict=True):
        layer.keys, layer.values = _tokens(layer, held, length)
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = length


def _tokens(layer: Any, held: Any, length: int) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values that a layer keeps of `length` tokens of a static layer."""
    first = max(0, length - layer.sliding_window + 1) if isinstance(layer, DynamicSlidingWindowLayer) else 0
    return held.keys[:, :, first:length].clone(), held.values[:, :, first:length].clone()
