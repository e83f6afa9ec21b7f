"""The first tokens of an encoder-decoder's decoder as one graph, with the keys and values of the cross-attention.

They are written where the steps read them. There is one graph for each number of tokens, captured when it comes again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.encoder_decoder import EncoderDecoderStep
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS

CAPTURED_PROMPT = "captured prompt"
KEPT = 4  # graphs that are kept, by their number of tokens
TOKENS = 512  # most rows x tokens of the decoder in a graph; more are not limited by launch overhead


class FilledLayer(CacheLayerMixin):
    """An empty layer of a cache; its first tokens are written into the first slots of a static one."""

    is_compileable = False
    is_sliding = False

    def __init__(self, static: Any):
        super().__init__()
        self._static, self._length = static, 0
        self.keys, self.values = static.keys, static.values
        self.dtype, self.device, self.is_initialized = static.dtype, static.device, True

    def lazy_initialization(self, *states: Any) -> None:
        """Does nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the tokens' states [B, heads, T, size]; returns them."""
        self._length = key_states.shape[2]
        for static, new in ((self._static.keys, key_states), (self._static.values, value_states)):
            static[:, :, : self._length].copy_(new)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a mask covers, index of the first)."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens."""
        return self._length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class CapturedPrompt:
    """The graph of `length` tokens a row into the caches of a step; the last ones' logits go into its batch.

    logits[B, T, V]: after each of the tokens, until it runs again.
    """

    def __init__(self, step: EncoderDecoderStep, length: int, graph: GraphOf):
        self._step = weakref.ref(step)  # which holds this
        self.logits: Tensor | None = None
        self._ids = torch.zeros(step.batch.rows, length, dtype=torch.int64, device=step.batch.device)
        self._graph: Graph = graph(self._run)

    def __call__(self, ids: Tensor) -> None:
        """Run it for ids[B, T]; what the encoder gave must lie in the step's `encoded`."""
        self._ids.copy_(ids)
        self._graph.replay()

    def _run(self) -> None:
        step = self._step()
        assert step is not None
        encoded = step.encoded
        both = EncoderDecoderCache(*(Cache(layers=list(map(FilledLayer, one.layers))) for one in _caches(step)))
        given = {"decoder_input_ids": self._ids, CACHE: both, **encoded.given()}
        with weight_prefetch():
            self.logits = step.by_modules(given)
            step.batch.logits.copy_(self.logits[:, -1])


def _caches(step: EncoderDecoderStep) -> tuple[Cache, Cache]:
    return step.cache, step.encoded.cache


class CapturedPrompts:
    """The CapturedPrompts of a step."""

    def __init__(self) -> None:
        self._captured: OrderedDict[int, CapturedPrompt | None] = OrderedDict()  # None: seen once, or a failed capture
        self._failed: set[int] = set()

    def of(self, step: EncoderDecoderStep, length: int, graph: GraphOf) -> CapturedPrompt | None:
        """The graph of so many tokens; None where the modules run them. Captures over the caches of the step."""
        if length * step.batch.rows > TOKENS or length >= step.capacity or length in self._failed:
            return None
        known = length in self._captured
        found = self._captured.get(length)
        if known and found is None:
            try:
                found = CapturedPrompt(step, length, graph)
            except torch.OutOfMemoryError:
                raise
            except (*CAPTURE_ERRORS, NotCaptured):  # the modules run it, and raise what is wrong with the call
                self._failed.add(length)
        self._captured[length] = found
        self._captured.move_to_end(length)
        while len(self._captured) > KEPT:
            self._captured.popitem(last=False)
        return found


def begin_caches(cache: Any, step: EncoderDecoderStep) -> None:
    """Initialise the layers of a call's own empty cache, for tokens that lie in the step's."""
    for part, static in zip((cache.self_attention_cache, cache.cross_attention_cache), _caches(step), strict=True):
        for place, layer in enumerate(static.layers):
            part.update(layer.keys[:, :, :0], layer.values[:, :, :0], place)
    cache.is_updated = dict.fromkeys(range(len(step.cache.layers)), True)


def prompt_why_not(given: Mapping[str, Any]) -> str | None:
    """Why the model's own forward must run the first tokens; None where a graph can."""
    cache = given[CACHE]
    if cache.get_seq_length() or any(cache.is_updated.values()):
        return "the cache holds tokens already"
    for name in ("decoder_attention_mask", "decoder_position_ids"):
        if given.get(name) is not None:
            return f"{name} was given"
    return None
