"""Native steps of encoder-decoders: what they are given, and the keys and values of what the encoder gave.

The model's own forward runs the encoder and the first tokens. The keys and values of the decoder's tokens then lie in a
Store as those of every model do (native_cache.py); those of the encoder's tokens stay the tensors that they are, which
steps only read, and their cache's layers stand for them (CrossContents).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.native_model import NativeModel
from accelpatch.kernels.cpu.step_encoded import StepEncoded
from accelpatch.runtime.cache_contents import attached, storing
from accelpatch.runtime.cache_form import why_not
from accelpatch.runtime.cpu.native_cache import Store
from accelpatch.runtime.graphs.encoder_decoder import MASK, OUTPUTS, CrossContents

IDS, POSITIONS, OWN_MASK = "decoder_input_ids", "decoder_position_ids", "decoder_attention_mask"
#: arguments of a step of an encoder-decoder that it reads, or that do not change what it computes
UNDERSTOOD = frozenset(
    {IDS, POSITIONS, OWN_MASK, OUTPUTS, MASK, CACHE, "use_cache", "return_dict", "tokenizer", "output_attentions"}
)


def encodes(model: Any) -> bool:
    """Whether a model is an encoder-decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def as_of_decoder(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that those of a decoder alone have."""
    cache: Any = given.get(CACHE)
    own = cache.self_attention_cache if type(cache) is EncoderDecoderCache else None
    names = {"input_ids": IDS, "attention_mask": OWN_MASK, "position_ids": POSITIONS}
    return {**{name: given.get(other) for name, other in names.items()}, CACHE: own}


def outputs(logits: Tensor, given: Mapping[str, Any]) -> Seq2SeqLMOutput:
    """The outputs of a call with these arguments."""
    return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=given[OUTPUTS][0], **{CACHE: given[CACHE]})


@dataclass(frozen=True, eq=False)
class Encoder:
    """What an encoder gave to the sequences of a Store. shown: the mask that was taken, a copy; None for none."""

    contents: CrossContents
    texts: Tensor | None
    shown: Tensor | None
    encoded: StepEncoded

    def is_of(self, cache: Any, mask: Tensor | None) -> bool:
        """Whether it is what such a cache and mask hold now."""
        if not self.contents.are_of(cache.cross_attention_cache) or self.contents.texts is not self.texts:
            return False
        return mask is self.shown or (mask is not None and self.shown is not None and torch.equal(mask, self.shown))


def encoder_why_not(store: Store, model: NativeModel, given: Mapping[str, Any], rows: int) -> str | None:
    """Give a Store what the encoder gave, where that is not what it has; or why the modules must run."""
    cache, mask = given[CACHE], given.get(MASK) if model.masked else None
    outputs = given.get(OUTPUTS)
    if outputs is None or not isinstance(outputs[0], Tensor):
        return "no output of an encoder"
    if has_encoder(store, model, given):
        return None
    contents = _contents_of(cache, model, rows)
    if isinstance(contents, str):
        return contents
    states = [(layer.keys, layer.values) for layer in contents.static.layers]
    length = states[0][0].shape[2]
    if mask is not None and (mask.dim() != 2 or tuple(mask.shape) != (rows, length) or mask.device.type != "cpu"):
        return f"the encoder's mask is {list(mask.shape)}, and its output {[rows, length]}"
    encoded = _encoded(states, contents.texts, mask)
    store.encoder = Encoder(contents, contents.texts, None if mask is None else mask.clone(), encoded)
    store.step = None  # it is made for these keys and values
    return None


def has_encoder(store: Store, model: NativeModel, given: Mapping[str, Any]) -> bool:
    """Whether a Store has what the encoder gave for a call with these arguments, or its model attends to none."""
    if model.masked is None:
        return True
    return store.encoder is not None and store.encoder.is_of(given[CACHE], given.get(MASK) if model.masked else None)


def _contents_of(cache: Any, model: NativeModel, rows: int) -> CrossContents | str:
    """The contents of the cache of the encoder's tokens; or why there are none for steps."""
    cross = cache.cross_attention_cache
    if reason := why_not(cross):
        return reason
    contents = attached(cross)
    if isinstance(contents, CrossContents):
        return contents
    layers = storing(cross)
    if len(layers) != len(model.layers) or not all(cache.is_updated.get(place) for place in range(len(layers))):
        return "the encoder's keys and values are not cached in all layers"
    states = [(layer.keys, layer.values) for layer in layers]
    for index, (layer, pair) in enumerate(zip(model.layers, states, strict=True)):
        assert layer is not None
        wanted = (rows, layer.linears["cross_q"].n // model.shape.head_dim, states[0][0].shape[2], model.shape.head_dim)
        for one in pair:
            if tuple(one.shape) != wanted or one.dtype != torch.float32 or one.device.type != "cpu":
                return f"layer {index} has {one.dtype} {list(one.shape)} of the encoder cached, not {list(wanted)}"
            if not one.is_contiguous():
                return f"layer {index} has keys and values of the encoder that are no whole tensors"
    length = int(cross.get_seq_length())
    static = SimpleNamespace(of_one_cache=True, layers=[SimpleNamespace(keys=k, values=v) for k, v in states])
    made = CrossContents(layers, static, length)
    made.texts = _texts(states)
    return made


def _texts(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The number of the text that each row attends to, the same for neighbours with equal keys and values, as the beams
    of a text have them."""
    (keys, _), (_, values) = states[0], states[-1]
    same = torch.ones(len(keys) - 1, dtype=torch.bool, device="cpu")
    for one in (keys, values):
        same &= (one[1:] == one[:-1]).flatten(1).all(1)
    return torch.nn.functional.pad((~same).long().cumsum(0), (1, 0))


def _encoded(states: list[tuple[Tensor, Tensor]], texts: Tensor | None, mask: Tensor | None) -> StepEncoded:
    rows, length = states[0][0].shape[0], states[0][0].shape[2]
    text = torch.arange(rows, device="cpu")
    if texts is not None:  # rows of one text read the same keys: those of its first row
        first = torch.searchsorted(texts, texts)
        alike = mask is None or torch.equal(mask, mask[first])
        text = first if alike else text
    ends, hidden = torch.full((rows,), length, dtype=torch.int64, device="cpu"), None
    if mask is not None and not bool(mask.all()):
        seen = mask.ne(0)
        hidden = torch.zeros(rows, length, device="cpu", dtype=torch.float32)
        hidden.masked_fill_(~seen, torch.finfo(torch.float32).min)
        last = torch.where(seen, torch.arange(1, length + 1, device="cpu"), 0).amax(1)
        ends = torch.where(last == 0, length, last)  # attention to what is all hidden is to all of it alike
    return StepEncoded(states, text, ends, hidden)
