"""The tokens of transformers' KV cache in a static cache, which steps write in place, and the way back.

`attach` leaves the cache usable: its layers are the objects that they were, say how many tokens they hold, and are
reordered (beam search) where the tokens lie. Who reads keys or values sees the slots, where they are this cache's alone
(on a CPU). Whatever else touches them gets tensors of its own back first, for all layers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from accelpatch.kernels.layouts.kv_states import States, copy_first_
from accelpatch.runtime.row_order import RowOrder

OWN_CACHE = "_accelpatch_own"  # attribute of a cache: whether generate() made it for the call that runs
WITHOUT = "DummyLayer"  # transformers' class of the layers of a cache that store nothing


class Contents:
    """`length` tokens of each layer of one of transformers' caches, in the first slots of a static cache.

    static: has layers with keys, values[B, Hkv, capacity, D] (States of kernels/layouts/kv_states.py: tensors, or what
    is read and written by indices as they are, in 8 bits), and `of_one_cache` where no other cache's tokens come to
    lie there. Within a step, whose token lies behind the others, a layer has it as soon as the step has run that layer.
    """

    def __init__(self, layers: Sequence[Any], static: Any, length: int):
        self.static, self.length, self._order = static, length, RowOrder()
        self.fits: Any = None  # what the layers of a model cache to which these were compared, and which they fit
        self._layers = [weakref.ref(layer) for layer in layers]  # weak: they hold this
        self._windows, self._detached = [window_of(layer) for layer in layers], False
        self._viewed = False  # somebody may have tensors that share the slots, which only fill up from here on
        self._ahead = 0  # within a step, the layers before this place have its token
        self._module: int | None = None  # within a step, the place of the layer whose module runs
        self._lock = threading.RLock()
        for place, layer in enumerate(layers):
            del layer.keys, layer.values
            layer.__dict__.pop("cumulative_length", None)
            layer.__class__ = ATTACHED[type(layer)]
            layer._contents, layer._place = self, place

    def are_of(self, cache: Any) -> bool:
        """Whether the layers of a cache are those of these tokens, and all have as many."""
        self._order.flush()
        return not (self._detached or self._ahead) and [ref() for ref in self._layers] == storing(cache)

    def count(self, place: int) -> int:
        """Number of tokens that a layer has."""
        return self.length + (place < self._ahead)

    def detach(self) -> None:
        """Give every layer copies of its tokens, and its class back. Does nothing where that was done."""
        with self._lock, torch.no_grad():
            self._order.flush()
            if self._detached:
                return
            alive = [(place, layer) for place, ref in enumerate(self._layers) if (layer := ref()) is not None]
            counts = [self.count(place) for place, _ in alive]
            copies = [_tokens(self._windows[place], self.static.layers[place], self.count(place)) for place, _ in alive]
            self._detached = True
            for (_, layer), (keys, values), count in zip(alive, copies, counts, strict=True):
                layer.__class__ = DETACHED[type(layer)]
                del layer._contents, layer._place
                layer.keys, layer.values = keys, values
                if type(layer) is DynamicSlidingWindowLayer:
                    layer.cumulative_length = count
            for device in {keys.device for keys, _ in copies if keys.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # the static cache's next user may use another stream

    def view(self, place: int, name: str) -> Tensor | None:
        """What a layer keeps of its keys or values, where it lies; None where somebody else may write there later."""
        with self._lock:
            self._order.flush()
            tensor: States = getattr(self.static.layers[place], name)
            if self._detached or not getattr(self.static, "of_one_cache", False) or not isinstance(tensor, Tensor):
                return None
            self._viewed = True
            count = self.count(place)
            return tensor[:, :, _first_kept(self._windows[place], count) : count]

    def reorder(self, place: int, rows: Tensor) -> bool:
        """Row b of a layer becomes its row rows[b], int64. Returns False where that must be done to the layer's own."""
        layers = self.static.layers
        with self._lock, torch.no_grad():
            if self._detached or self._ahead or self._viewed or len(rows) != len(layers[place].keys):
                return False
            self._order.ask(layers, place, rows, self.length)
            return True

    def append(self, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write a step's token [B, Hkv, 1, D] of the layer whose module runs; returns it behind all that the layer
        keeps. None where that must be done to the layer's own tensors."""
        static, end = self.static.layers[layer._place], self.length + 1
        pairs = ((static.keys, keys), (static.values, values))
        with self._lock, torch.no_grad():
            if self._detached or not self._module == self._ahead == layer._place:
                return None
            if any(_alike(slots[:, :, self.length : end]) != _alike(new) for slots, new in pairs):
                return None
            for slots, new in pairs:
                slots[:, :, self.length : end] = new
            self._ahead += 1
        first = _first_kept(self._windows[layer._place], self.length)
        return static.keys[:, :, first:end], static.values[:, :, first:end]

    @contextmanager
    def module(self, place: int) -> Iterator[None]:
        """Context manager around the module of the layer at `place` in a step, which adds the token by `update`."""
        self._fill(place)
        self._module = place
        try:
            yield
        except BaseException:
            self._ahead = 0  # the step is no more, and attached layers have not seen its token
            raise
        finally:
            self._module = None
        if self._ahead == place:  # it has cached nothing: other layers have a token more from here on
            self.detach()
        self._ahead = place + 1

    def grow(self) -> None:
        """A step was made, and its token written behind the others."""
        with self._lock:
            if self._detached:
                self._fill(len(self._layers))
            self.length += 1
            self._ahead = 0

    def _fill(self, place: int) -> None:
        """Within a step, the layers before `place` have its token. Layers that were detached meanwhile (by a hook that
        reads the cache) get a copy."""
        with self._lock, torch.no_grad():
            if self._detached:
                token = slice(self.length, self.length + 1)
                for ref, static in zip(
                    self._layers[self._ahead : place], self.static.layers[self._ahead :], strict=False
                ):
                    if (layer := ref()) is not None:
                        layer.update(static.keys[:, :, token].clone(), static.values[:, :, token].clone())
            self._ahead = place

    def move(self, static: Any) -> None:
        """Copy the tokens to a larger static cache, where they lie from here on."""
        self._order.flush()
        copy_slots(self.static, static)
        self.static = static


ContentsT = TypeVar("ContentsT", bound=Contents)


def _states(name: str) -> property:
    """The keys or values: a view of the slots, where nobody else writes; else of the layer's own, which detaches."""

    def get(layer: Any) -> Any:
        view = layer._contents.view(layer._place, name)
        if view is not None:
            return view
        layer._contents.detach()
        return getattr(layer, name)  # of the layer's own class by now

    def put(layer: Any, value: Any) -> None:
        layer._contents.detach()
        setattr(layer, name, value)

    return property(get, put)


class _Attached:
    """What a layer of transformers' cache has in place of its own while its tokens lie in a static cache."""

    _contents: Contents
    _place: int

    keys = _states("keys")
    values = _states("values")

    @property
    def cumulative_length(self) -> int:
        """Number of tokens so far, of a layer with a sliding window."""
        return self._contents.count(self._place)

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        self._contents.detach()
        self.cumulative_length = value

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        contents = _contents_of(self)
        return type(self).get_seq_length(self) if contents is None else contents.count(self._place)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; the one of a step where the others lie."""
        contents = _contents_of(self)
        appended = None if contents is None else contents.append(self, key_states, value_states)
        if appended is not None:
            return appended
        return _own_class(self).update(self, key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows in place, as beam search does."""
        contents = _contents_of(self)
        if contents is None or not contents.reorder(self._place, beam_idx):
            _own_class(self).reorder_cache(self, beam_idx)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own_class(self).__reduce_ex__(self, protocol)


def _contents_of(layer: Any) -> Contents | None:
    """Where the tokens of a layer lie. None for one that was detached since somebody took the method that asks."""
    return vars(layer).get("_contents")


def _own_class(layer: Any) -> Any:
    """The class of a layer with tensors of its own, which it has from here on."""
    if (contents := _contents_of(layer)) is not None:
        contents.detach()
    return type(layer)


def _attached(plain: type) -> type:
    """The class of an attached layer. No second base: an object's class changes only to one of equal layout."""
    left = {"__dict__", "__weakref__"} | (set() if plain is DynamicSlidingWindowLayer else {"cumulative_length"})
    body = {name: value for name, value in vars(_Attached).items() if name not in left}
    return type(plain)(plain.__name__, (plain,), body | {"__module__": plain.__module__})


ATTACHED = {plain: _attached(plain) for plain in (DynamicLayer, DynamicSlidingWindowLayer)}
DETACHED = {attached: plain for plain, attached in ATTACHED.items()}


def storing(cache: Any) -> list[Any]:
    """The layers of a cache that store something. Gemma's small models end with layers that read what others stored;
    newer versions of transformers have layers without tensors in their places."""
    layers = list(cache.layers)
    while layers and type(layers[-1]).__name__ == WITHOUT:
        layers.pop()
    return layers


def attached(cache: Any) -> Contents | None:
    """The contents of `cache` that lie in a static cache; None where it holds its tokens itself."""
    contents: Contents | None = getattr(cache.layers[0], "_contents", None) if cache.layers else None
    return contents if contents is not None and contents.are_of(cache) else None


def attach(cache: Any, static: Any, kind: type[ContentsT] = Contents) -> ContentsT:  # type: ignore[assignment]
    """Move the tokens of `cache`, for which cache_form.py has no objection, into `static`, and leave them there.

    Of a sliding-window layer only the last tokens exist; the window hides all earlier ones.
    """
    length = int(cache.get_seq_length())
    layers = storing(cache)
    for layer in layers:
        if type(layer) in DETACHED:  # of another cache's tokens, or in another order
            layer._contents.detach()
    for layer, own in zip(layers if length else (), static.layers, strict=False):
        first = length - layer.keys.shape[2]
        own.keys[:, :, first:length] = layer.keys
        own.values[:, :, first:length] = layer.values
    return kind(layers, static, length)


def copy_slots(static: Any, larger: Any) -> None:
    """Copy all slots of a static cache to the first ones of a larger one."""
    for own, new in zip(static.layers, larger.layers, strict=True):
        copy_first_(own.keys, new.keys)
        copy_first_(own.values, new.values)


def window_of(layer: Any) -> int:
    """The sliding window of a layer in tokens, the new one included; 0 for none."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0


def _first_kept(window: int, length: int) -> int:
    """Index of the first of `length` tokens that a layer with a window keeps."""
    return max(0, length - window + 1) if window else 0


def _tokens(window: int, layer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values that a layer keeps of `length` tokens of a static layer."""
    kept = slice(_first_kept(window, length), length)
    return layer.keys[:, :, kept].clone(), layer.values[:, :, kept].clone()


def _alike(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
