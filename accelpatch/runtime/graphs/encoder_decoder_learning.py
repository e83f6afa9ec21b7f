"""What a few one-token calls of an encoder-decoder show, before a step of it is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.spread import device_of
from accelpatch.runtime.cache_form import why_not
from accelpatch.runtime.graphs.encoder_decoder import Learned, carrier_of, hidden_of, mask_of, shown
from accelpatch.runtime.graphs.kv_cache import CapturedLayer, NotCaptured, shapes_of

SLOTS = 4  # of the small static cache of the check
UNWRITTEN = 16.0  # what hidden slots hold in the check: far from what keys and values are
BEHIND = (1, 7)  # hidden tokens of the check of masks
ROUNDINGS = 32  # most roundings of the dtype, relative to the norm of the logits, by which the check may be off


class _Calls:
    """One-token calls over the first row of what an encoder gave to a call of generate()."""

    def __init__(self, model: Any, given: Mapping[str, Any]):
        self._model, self._device = model, device_of(model)
        self.hidden: Tensor = hidden_of(given)[:1]
        mask = mask_of(given)
        self.mask: Tensor | None = None if mask is None else mask[:1]
        self.carrier = carrier_of(given)

    def __call__(self, cache: Any, hidden: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
        """Logits [1, V] after token 0."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        call = {"decoder_input_ids": ids, CACHE: cache, "use_cache": True, **shown(hidden, mask, self.carrier)}
        logits: Tensor = self._model(**call, **more, return_dict=True).logits[:, -1]
        return logits

    def of_two(self, other: bool) -> Tensor:
        """Logits after two tokens of the encoder, the second hidden by the mask. other: it is another one."""
        one = self.hidden[:, :1]
        states = torch.cat([one, 1 - 2 * one if other else one], dim=1)
        mask = torch.tensor([[1, 0]], device=self._device)
        return self(EncoderDecoderCache(DynamicCache(), DynamicCache()), states, mask)

    def rounded(self, more: int) -> Tensor:
        """Logits after all tokens of the encoder, without a mask, or with one that hides so many more behind them."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden = torch.nn.functional.pad(self.hidden, (0, 0, 0, more))
        seen = torch.arange(hidden.shape[1], device=self._device) < self.hidden.shape[1]
        return self(cache, hidden, seen.long()[None] if more else None)

    def static(self, cache: EncoderDecoderCache, unwritten: float) -> Tensor:
        """Logits after a second token over a static cache whose other slots hold any numbers."""
        slot = torch.ones(1, dtype=torch.int64, device=self._device)
        layers = [CapturedLayer(shape, 1, SLOTS, slot) for shape in shapes_of(cache.self_attention_cache)]
        for layer, filled in zip(layers, cache.self_attention_cache.layers, strict=True):
            for mine, its in ((layer.keys, filled.keys), (layer.values, filled.values)):
                mine.fill_(unwritten)
                mine[:, :, :1].copy_(its)
        seen = (torch.arange(SLOTS, device=self._device) < 2).long()[None]
        both = EncoderDecoderCache(Cache(layers=layers), cache.cross_attention_cache)
        return self(both, self.hidden, self.mask, decoder_attention_mask=seen)


def learned_with_encoder(model: Any, given: Mapping[str, Any]) -> Learned:
    """What the layers of an encoder-decoder cache. given: a call's arguments. Raises NotCaptured."""
    call, cache = _Calls(model, given), EncoderDecoderCache(DynamicCache(), DynamicCache())
    logits = call(cache, call.hidden, call.mask)
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    for part in (own, cross):
        if reason := why_not(part):
            raise NotCaptured(reason)
        if not part.layers or not all(layer.is_initialized for layer in part.layers):
            raise NotCaptured("a layer of the model caches nothing")
    length = call.hidden.shape[1]
    if own.get_seq_length() != 1 or any(layer.keys.shape[2] != length for layer in cross.layers):
        raise NotCaptured("its cross-attention does not cache the tokens of the encoder")
    found = shapes_of(own), shapes_of(cross)
    one, other = (call.static(cache, unwritten) for unwritten in (0.0, UNWRITTEN))
    due = call(cache, call.hidden, call.mask)
    if not _close(one, other):  # a product's sums may come in another order from call to call
        raise NotCaptured("its steps attend to slots of the cache that the mask hides")
    if not _close(one, due):
        raise NotCaptured("its steps over a static cache compute other logits")
    masked = call.mask is None or call.mask.dim() == 2
    hides = masked and torch.equal(call.of_two(other=False), call.of_two(other=True))
    # a mask is another's where the model takes it for one of the encoder's inputs (Speech2Text, SpeechT5)
    hides = hides and all(_close(call.rounded(more), call.rounded(0)) for more in BEHIND)
    return Learned(int(logits.shape[-1]), *found, hides, call.carrier)


def _close(one: Tensor, due: Tensor) -> bool:
    """Whether logits differ by roundings alone."""
    difference = (one.double() - due.double()).norm()
    return bool(difference <= ROUNDINGS * torch.finfo(one.dtype).eps * due.double().norm())
