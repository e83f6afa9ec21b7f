"""The captured step of an encoder-decoder: one token of the decoder, over static keys and values of both attentions.

Those of the cross-attention are computed once a call of generate(), by the model's own forward, and read by every step.
Their cache has the encoder's length. Where the model hides masked tokens of the encoder, it is rounded up and the mask
hides the rest, so that texts of neighbouring lengths share a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cached import Cached
from accelpatch.fusion.cross_step import STEP, CrossCache, CrossStep
from accelpatch.runtime.cache_contents import Contents, attach
from accelpatch.runtime.cache_form import METHODS, why_not
from accelpatch.runtime.graphs.capture import GraphOf
from accelpatch.runtime.graphs.kv_cache import Lent, NotCaptured
from accelpatch.runtime.graphs.step import Batch, CapturedStep

OUTPUTS = "encoder_outputs"
MASK = "attention_mask"  # of the encoder's inputs, or of its outputs where they have as many tokens
ROUNDED = 64  # lengths of the encoder's output are rounded up to a multiple of this where a mask hides the rest


@dataclass(frozen=True)
class Source:
    """Shapes of what the encoder gives: `length` tokens of width `size`, and the shape of a row of the mask, or None.

    Graphs are for one of them.
    """

    length: int
    size: int
    mask: tuple[int, ...] | None


@dataclass(frozen=True)
class Learned:
    """What one token of an encoder-decoder shows. own, cross: what layers cache of the decoder's and of the encoder's
    tokens. hides: whether tokens of the encoder that the mask hides have no effect. carrier: the class of the encoder's
    outputs where these carry the mask."""

    vocabulary: int
    own: tuple[Cached, ...]
    cross: tuple[Cached, ...]
    hides: bool
    carrier: Any = None

    def source(self, given: Mapping[str, Any]) -> Source:
        """The shapes that a graph for these arguments needs."""
        hidden, mask = hidden_of(given), mask_of(given)
        length, size = int(hidden.shape[1]), int(hidden.shape[2])
        if self.hides and (mask is None or tuple(mask.shape) == tuple(hidden.shape[:2])):
            length = -(-length // ROUNDED) * ROUNDED
            return Source(length, size, (length,))
        return Source(length, size, None if mask is None else tuple(mask.shape[1:]))


def hidden_of(given: Mapping[str, Any]) -> Tensor:
    """The encoder's output [B, S, K] among a call's arguments."""
    hidden: Tensor = given[OUTPUTS][0]
    return hidden


def carrier_of(given: Mapping[str, Any]) -> Any:
    """The class of the encoder's outputs among a call's arguments, where they carry the mask of theirs (Moonshine);
    else None."""
    kind = type(given[OUTPUTS])
    return kind if issubclass(kind, ModelOutput) and MASK in {field.name for field in fields(kind)} else None


def mask_of(given: Mapping[str, Any]) -> Any:
    """The mask of the encoder's tokens, or of its inputs, among a call's arguments; None for none."""
    return given.get(MASK) if carrier_of(given) is None else given[OUTPUTS].attention_mask


def shown(hidden: Tensor, mask: Tensor | None, carrier: Any) -> dict[str, Any]:
    """The arguments of a call of the model for what an encoder gave. carrier: as of Learned."""
    if carrier is not None:
        return {OUTPUTS: carrier(last_hidden_state=hidden, attention_mask=mask)}
    return {OUTPUTS: BaseModelOutput(hidden)} | ({} if mask is None else {MASK: mask})


class CrossLayer(CacheLayerMixin):
    """keys, values[B, heads, S, size] of the encoder's tokens; steps only read them."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, *states: Any) -> None:
        """Does nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises NotCaptured: a step that computes them anew does not read what was computed once."""
        raise NotCaptured("its steps compute the keys and values of the cross-attention anew")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a mask covers, index of the first)."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class CrossContents(Contents):
    """The keys and values of the cross-attention of one of transformers' caches.

    texts[B]: rows with equal numbers read the same output of the encoder, as the beams of a text do, so that they may
    change places without a copy; None where that is not known.
    """

    texts: Tensor | None = None
    _kept: tuple[Tensor | None, int] = None, 0  # the last rows that were found to change places so, and of which layer

    def reorder(self, place: int, rows: Tensor) -> bool:
        """As in Contents."""
        known = rows is self._kept[0] and place == self._kept[1] + 1
        if self.texts is not None and not known:
            if len(rows) == len(self.texts) and torch.equal(self.texts[rows.to(self.texts.device)], self.texts):
                known = True
            else:
                self.texts = None
        self._kept = (rows, place) if known else (None, 0)
        return self.texts is not None or super().reorder(place, rows)


def texts_of(given: Mapping[str, Any]) -> Tensor:
    """The number of the encoder's output that each row reads, the same for neighbours that read equal ones."""
    same = torch.ones(len(hidden_of(given)) - 1, dtype=torch.bool, device=hidden_of(given).device)
    for one in (hidden_of(given), mask_of(given)):
        if one is not None:
            same = same & (one[1:] == one[:-1]).flatten(1).all(1).to(same.device)
    return torch.nn.functional.pad((~same).long().cumsum(0), (1, 0))


class Encoded(Lent):
    """What the encoder gave to `rows` sequences, at fixed addresses: hidden[B, S, K], its mask, the cross-attention's
    keys and values. Steps of several capacities share it."""

    def __init__(self, rows: int, source: Source, learned: Learned, device: torch.device):
        self.source, self._carrier = source, learned.carrier
        dtype = learned.cross[0].dtype
        self.hidden = torch.zeros(rows, source.length, source.size, dtype=dtype, device=device)
        shape = None if source.mask is None else (rows, *source.mask)
        self.mask = None if shape is None else torch.ones(shape, dtype=torch.int64, device=device)
        states = _tensors(learned.cross, rows, source.length)
        self.cache = Cache(layers=[CrossLayer(keys, values) for keys, values in states])
        hides = learned.hides and self.mask is not None and source.mask == (source.length,)
        self.read: CrossCache | None = None  # for fused layers
        if isinstance(states, Tensor):
            self.read = CrossCache(states, self.mask if hides else None)

    def take(self, cache: Any, given: Mapping[str, Any]) -> CrossContents:
        """Move the keys and values of one of transformers' caches here, and copy what they were made from."""
        self.vacate()
        self.show(given)
        return self.attach(cache, given)

    def attach(self, cache: Any, given: Mapping[str, Any]) -> CrossContents:
        """The same after `show`, and where nothing of another cache lies here any more."""
        contents = attach(cache, self.cache, CrossContents)
        contents.texts = texts_of(given)
        self._contents = weakref.ref(contents)
        return contents

    def show(self, given: Mapping[str, Any]) -> None:
        """Copy the encoder's output and its mask from a call's arguments."""
        hidden, mask = hidden_of(given), mask_of(given)
        length = hidden.shape[1]
        self.hidden[:, :length].copy_(hidden)
        if self.mask is not None and (mask is None or tuple(mask.shape[1:]) != self.source.mask):
            self.mask.zero_()  # it was rounded up
            self.mask[:, :length] = 1 if mask is None else mask.ne(0)
        elif self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        if self.read is not None:
            self.read.show()

    def given(self) -> dict[str, Any]:
        """The arguments of a call of the model over it."""
        return shown(self.hidden, self.mask, self._carrier)


def _tensors(shapes: Sequence[Cached], rows: int, length: int) -> Any:
    """Keys and values of each layer: [layers, 2, B, heads, S, size] where all are of one shape, else a list of both."""
    first = shapes[0]
    if all(one == first for one in shapes) and first.sizes[0] == first.sizes[1]:
        shape = (len(shapes), 2, rows, first.heads, length, first.sizes[0])
        return torch.zeros(shape, dtype=first.dtype, device=first.device)
    return [
        tuple(torch.zeros(rows, one.heads, length, size, dtype=one.dtype, device=one.device) for size in one.sizes)
        for one in shapes
    ]


class EncoderDecoderStep(CapturedStep):
    """A CapturedStep of an encoder-decoder, for what the encoder gave. ran: places of the layers that run fused."""

    def __init__(
        self, model: Any, batch: Batch, shapes: Sequence[Cached], capacity: int, graph: GraphOf, encoded: Encoded
    ):
        self.encoded = encoded
        self.ran = set[int]()
        self.first_tokens: Any = None  # encoder_decoder_prompt.CapturedPrompts, made at the first call
        super().__init__(model, batch, shapes, capacity, graph)

    @property
    def exceptions(self) -> str:
        """For a report: the layers that run as modules, where others are fused."""
        rest = sorted(set(range(len(self.cache.layers))) - self.ran)
        return f", but modules in layers {rest}" if rest else ""

    def _given(self) -> dict[str, Any]:
        """The arguments of the model's own forward."""
        batch, encoded = self.batch, self.encoded
        places = {"decoder_position_ids": batch.positions} if "decoder_position_ids" in self._accepted else {}
        both = EncoderDecoderCache(self.cache, encoded.cache)
        if encoded.read is not None:
            setattr(both, STEP, CrossStep(batch.positions, batch.slot, self.mask, self.cache, encoded.read, self.ran))
        given = {"decoder_input_ids": batch.tokens[:, None], "decoder_attention_mask": self.mask, CACHE: both}
        return {**given, **encoded.given(), **places}


def call_why_not(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why a step cannot continue what these arguments of generate() begin; None where it can."""
    states = given.get(OUTPUTS)
    if not isinstance(states, ModelOutput | tuple) or not isinstance(states[0], Tensor) or states[0].dim() != 3:
        return "no output of an encoder [B, S, K]"
    for name in ("decoder_attention_mask", "decoder_position_ids"):
        if given.get(name) is not None and given[name].dim() != 2:
            return f"{name} of another shape than [B, L]"
    mask = mask_of(given)
    if mask is not None and not (isinstance(mask, Tensor) and len(mask) == len(states[0])):
        return "an attention mask of another number of rows"
    return cache_why_not(given.get(CACHE))


def hides_all(given: Mapping[str, Any]) -> bool:
    """Whether the mask of a call hides every token of the encoder in some row: stock attends to all of them then. It
    waits for the device."""
    mask = mask_of(given)
    return mask is not None and mask.dim() == 2 and not bool(mask.ne(0).any(1).all())


def cache_why_not(cache: Any) -> str | None:
    """Why steps cannot go on with a cache of transformers; None where they can."""
    if type(cache) is not EncoderDecoderCache:
        return f"the cache is a {type(cache).__name__}"
    if not METHODS.isdisjoint(vars(cache)):
        return "the cache has a method of its own on the instance"
    return why_not(cache.self_attention_cache) or why_not(cache.cross_attention_cache)
