"""The static KV cache of a captured step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cached import Cached
from accelpatch.fusion.spread import device_of
from accelpatch.kernels.layouts.kv_states import FLOAT, floats, zeros
from accelpatch.runtime.cache_contents import Contents, storing, window_of
from accelpatch.runtime.cache_form import why_not
from accelpatch.runtime.graphs.capture import AT_MOST

SMALLEST = 256  # least capacity in tokens
LONG, STEP = 8192, 512  # capacities beyond LONG are multiples of STEP
GROWTH = 2048  # and grow by so much


class CapturedLayer(CacheLayerMixin):
    """keys, values[B, heads, capacity, size] in a format of kernels/layouts/kv_states.py. A step writes at `slot`[B] on
    the device and attends over all slots."""

    is_compileable = True
    is_sliding = False  # all tokens are kept; the mask hides those outside the window

    #: [layers, 2, B, heads, capacity, size] of which keys and values are parts, where those of all layers are
    block: Tensor | None = None

    def __init__(self, shape: Cached, batch: int, capacity: int, slot: Tensor, form: str = FLOAT, made: Any = None):
        super().__init__()
        given: Any = (shape.dtype, shape.device)
        made = made or (zeros(form, (batch, shape.heads, capacity, size), *given) for size in shape.sizes)
        self.keys, self.values = made  # tensors, or what is read and written as they are
        self.dtype, self.device = shape.dtype, shape.device
        self.is_initialized = True
        self._slot, self._rows = slot, torch.arange(batch, device=shape.device)
        self.ahead = 0  # tokens that the step under way has written here

    def lazy_initialization(self, *states: Any) -> None:
        """Does nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's states [B, heads, 1, size] at its row's slot, or T tokens' of one row from its slot on;
        returns all keys and values."""
        self.ahead = key_states.shape[2]
        if self.ahead == 1:
            self.keys[self._rows, :, self._slot] = key_states[:, :, 0]
            self.values[self._rows, :, self._slot] = value_states[:, :, 0]
        elif isinstance(self.keys, Tensor) and isinstance(self.values, Tensor):
            slots = self._slot + torch.arange(self.ahead, device=self.device)
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
        else:
            raise NotCaptured("several tokens at once for modules over a cache in 8 bits")
        return floats(self.keys), floats(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a mask covers, index of the first)."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Tensor:
        """Number of cached tokens of the first row, as a tensor on the device."""
        length = self._slot[0] + self.ahead if self.ahead else self._slot[0]
        setattr(length, AT_MOST, self.get_max_length() - (not self.ahead))
        return length

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


def captured_layers(
    shapes: Sequence[Cached], batch: int, capacity: int, slot: Tensor, form: str = FLOAT
) -> list[CapturedLayer]:
    """A layer each; those of several rows in one block, which beam search reorders at once, where all are alike."""
    first = shapes[0]
    alike = all((one.heads, one.sizes, one.dtype, one.device) == (first.heads, first.sizes[:1] * 2, first.dtype,
                first.device) for one in shapes)  # fmt: skip
    if batch == 1 or form != FLOAT or not alike:
        return [CapturedLayer(shape, batch, capacity, slot, form) for shape in shapes]
    sizes = (len(shapes), 2, batch, first.heads, capacity, first.sizes[0])
    block = torch.zeros(sizes, dtype=first.dtype, device=first.device)
    layers = [
        CapturedLayer(shape, batch, capacity, slot, made=tuple(both)) for shape, both in zip(shapes, block, strict=True)
    ]
    for layer in layers:
        layer.block = block
    return layers


class Lent:
    """A static cache in which the contents of one of transformers' caches may lie, of one at a time."""

    _contents: weakref.ref[Contents] | None = None

    def holds(self, contents: Contents | None) -> bool:
        """Whether these contents lie here."""
        return contents is not None and self._contents is not None and self._contents() is contents

    def vacate(self) -> None:
        """Give the cache whose contents lie here tensors of its own."""
        contents = None if self._contents is None else self._contents()
        if contents is not None:
            contents.detach()
        self._contents = None


def capacity_for(length: int, longest: int | None) -> int:
    """A capacity for `length` tokens: a power of two, and beyond LONG, where half of one would be gigabytes, a multiple
    of STEP; at most `longest` rounded up to a multiple of 64."""
    room = max(SMALLEST, 1 << (length - 1).bit_length()) if length <= LONG else -(-length // STEP) * STEP
    return room if longest is None else max(length, min(room, -(-longest // 64) * 64))


def grown(capacity: int, longest: int | None) -> int:
    """The capacity after this one, which is full."""
    wanted = capacity + (1 if capacity < LONG else GROWTH)
    return capacity_for(wanted if longest is None else max(capacity + 1, min(wanted, longest)), longest)


def shapes_of(cache: Any) -> tuple[Cached, ...]:
    """What the layers of a filled cache hold."""
    found = ((window_of(layer), layer.keys, layer.values.shape[3]) for layer in storing(cache))
    return tuple(Cached(w, k.shape[1], (k.shape[3], size), k.dtype, k.device) for w, k, size in found)


def cache_of(outputs: Any) -> Any:
    """The KV cache in a model's outputs."""
    return getattr(outputs, CACHE)


class NotCaptured(Exception):
    """Why a model's step cannot be captured, or its cache be static; the message goes into the report."""


def learned(model: Any) -> tuple[int, tuple[Cached, ...]]:
    """(vocabulary size, what the layers cache), found by running one token. Raises NotCaptured."""
    cache = DynamicCache(config=model.config)
    one = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    outputs = model(input_ids=one, attention_mask=one + 1, use_cache=True, **{CACHE: cache})
    if reason := why_not(cache):
        raise NotCaptured(reason)
    if not storing(cache) or not all(layer.is_initialized for layer in storing(cache)):
        raise NotCaptured("a layer of the model caches nothing")
    return int(outputs.logits.shape[-1]), shapes_of(cache)
