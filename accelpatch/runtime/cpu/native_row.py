"""Native steps over several tokens of one sequence: the last one and draft tokens after it, as one native call.

Each token's logits have the same bits as by a step of its own. Nothing is appended to the cache: the keys and values
lie behind its tokens, where later steps write over them, until `NativeRow.grow` says that a token belongs to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.cpu.native_library import MAX_BATCH
from accelpatch.runtime.cache_contents import Contents
from accelpatch.runtime.cpu.native_cache import Store, native_contents
from accelpatch.runtime.cpu.native_step import NATIVE, NativeRuntime, Reading
from accelpatch.runtime.cpu.torch_threads import all_threads
from accelpatch.runtime.quantized_cache import format_of_cache


class NativeRow:
    """Steps of a model over a cache of one sequence.

    start: number of slots of padding. offset: what positions are more than slots. layers: how many run before the last
    norm and the head; None for all.
    """

    def __init__(
        self, runtime: NativeRuntime, model: Any, cache: Any, start: int = 0, offset: int = 0, layers: int | None = None
    ):
        self._runtime, self._model, self._cache, self._layers = runtime, model, cache, layers
        self._start, self._offset = start, offset
        self.contents: Contents | None = None

    def logits(self, tokens: list[int], slot: int) -> Tensor | None:
        """Logits [T, V] float32 after each of T tokens, 1 to MAX_BATCH, the first at `slot`; None for the modules."""
        reading = self._runtime.reading(self._model)
        if self.why_not(reading) is not None or reading.model is None:
            return None
        contents = self.contents
        if contents is None or not contents.are_of(self._cache):
            found = native_contents(self._cache, 1, reading.model, format_of_cache(self._cache, self._runtime.form))
            if isinstance(found, str):
                return None
            contents = self.contents = found
        store: Store = contents.static
        if slot + len(tokens) > store.capacity:
            larger = Store(zip(store.keys, store.values, strict=True), 2 * (slot + len(tokens)), store.form)
            contents.move(larger)
            store = larger
        first = torch.arange(slot, slot + len(tokens), dtype=torch.int64, device="cpu")
        starts = torch.full_like(first, self._start)
        places = (first, starts, first + self._offset)
        ids = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        with all_threads():
            made = _step(reading, store, len(tokens), self._layers)(ids, *places)
        self._runtime.paths[NATIVE] += 1
        return made

    def why_not(self, reading: Reading) -> str | None:
        """Why the modules must run."""
        reason = reading.unfit or self._runtime.code.cache or reading.watch.objection()
        if reason is not None or reading.model is None:
            return reason or "no native step"
        hooks = reading.watch.watched() or self._model._forward_hooks or self._model._forward_pre_hooks
        if hooks or reading.model.unfused:
            return "a hook" if hooks else next(iter(reading.model.unfused.values()))
        return None

    def first(self, layers: int) -> NativeRow:
        """The first layers of the model, over the same cache."""
        return NativeRow(self._runtime, self._model, self._cache, self._start, self._offset, layers)

    def grow(self) -> None:
        """The token behind the others, whose step was made, belongs to the cache."""
        assert self.contents is not None
        length = self.contents.length
        slot, start = torch.tensor([length]), torch.tensor([self._start])
        self.contents.static.places = (slot, start, slot + self._offset)
        self.contents.grow()

    @property
    def length(self) -> int:
        """Tokens of the cache."""
        return int(self._cache.get_seq_length()) if self.contents is None else self.contents.length

    def crop(self, length: int) -> None:
        """The cache, which nobody else sees, has so many tokens."""
        if self.contents is not None:
            self.contents.length = length


def _step(reading: Reading, store: Store, tokens: int, layers: int | None) -> Any:
    assert reading.model is not None
    if store.made_by is not reading.model:
        store.step, store.several, store.made_by = None, {}, reading.model
    if tokens == 1 and layers is None:
        store.step = store.step or reading.model.step(store.keys, store.values)
        return store.step
    if layers not in store.several:
        model = reading.model if layers is None else reading.model.first(layers)
        store.several[layers] = model.step(store.keys[:layers], store.values[:layers], MAX_BATCH)
    return store.several[layers]
