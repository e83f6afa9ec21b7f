"""The KV buffers of native steps, in which the tokens of one of transformers' caches lie (cache_contents.py)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from accelpatch.fusion.native_model import NativeModel
from accelpatch.kernels.cpu.native_library import PLAIN
from accelpatch.kernels.layouts.kv_states import FLOAT, States, zeros
from accelpatch.runtime.cache_contents import Contents, attach, attached
from accelpatch.runtime.cache_form import misfit, why_not

ROOM = 256  # free slots in tokens that a new store has at least; it doubles when full


class Store:
    """keys, values: of each layer [B, Hkv, capacity, D] in a format of kernels/layouts/kv_states.py (FLOAT is float32),
    and the native step over them.

    like: keys and values of each layer, [B, Hkv, any, D], whose shapes the store's have.
    """

    of_one_cache = True

    def __init__(self, like: Iterable[tuple[States, States]], capacity: int, form: str = FLOAT):
        pairs = [(_room(keys, capacity, form), _room(values, capacity, form)) for keys, values in like]
        self.keys, self.values = (list(one) for one in zip(*pairs, strict=True))
        self.layers = [SimpleNamespace(keys=keys, values=values) for keys, values in pairs]
        self.capacity, self.form = capacity, form
        self.step: Any = None
        self.several: dict[int | None, Any] = {}  # layers (None: all) -> a step of several tokens of one sequence
        self.made_by: Any = None
        self.encoder: Any = None  # what an encoder gave (encoder_decoder.py), of the model's that attend to one
        self.places: Any = None  # slots, starts and positions of the last step, if no layer ran as a module


def _room(states: States, capacity: int, form: str) -> States:
    batch, heads, _, size = states.shape
    with torch.inference_mode(False):  # what is made in inference mode can be written there alone
        return zeros(form, (batch, heads, capacity, size), **PLAIN)


def native_contents(cache: Any, batch: int, model: NativeModel, form: str = FLOAT) -> Contents | str:
    """The contents of `cache` in a Store with room for one more token; or the reason why there can be none.

    form: of the Store, where it is a new one.
    """
    if (reason := why_not(cache) or misfit(cache, model.cached)) is not None:
        return reason
    contents, length = attached(cache), cache.get_seq_length()
    if contents is not None and isinstance(contents.static, Store):
        rows = contents.static.keys[0].shape[0]
        if rows != batch:
            return f"the cache has {rows} sequences, and {batch} were given"
        if length == contents.static.capacity:
            store: Store = contents.static
            contents.move(Store(zip(store.keys, store.values, strict=True), 2 * length, store.form))
        return contents
    like = [(layer.keys, layer.values) for layer in (cache if contents is None else contents.static).layers]
    for one in (tensor for pair in like for tensor in pair):
        if one.shape[0] != batch or one.dtype != torch.float32 or one.device.type != "cpu":
            return f"the cache holds {one.dtype} keys and values of batch {one.shape[0]} on {one.device}"
    return attach(cache, Store(like, length + ROOM, form))
