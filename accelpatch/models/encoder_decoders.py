"""Decoder layers of encoder-decoders as data: what each class of transformers computes, by the dotted names of its
modules; and what stands before and behind the layers, for steps that run no module (a CPU's native ones).

To add a class: a row in FORMS, one of its model in ENDS, and a family with it in tests/support/encoder_decoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from accelpatch.models.encoders import class_of, part_of


@dataclass(frozen=True)
class AttentionNames:
    """Dotted names of an attention module in its layer, and of its linear layers."""

    module: str
    q: str
    k: str
    v: str
    o: str


@dataclass(frozen=True)
class CrossForm:
    """What a decoder layer that attends to an encoder computes, by dotted names in it.

        post    x = norm1(x + own(x));  x = norm2(x + cross(x));  norm3(x + down(activation(up(x))))
        else    x = x + own(norm1(x));  x = x + cross(norm2(x));  x + down(activation(up(norm3(x))))

    own: attention to the decoder's tokens. cross: to the encoder's. up: one linear layer; where it has two, the first
    one's activation multiplies the second. rms: whether the norms are RMSNorms, else LayerNorms. bias: whether scores
    of `own` get a bias by distance, which the first layer computes and gives to the others.
    """

    own: AttentionNames
    cross: AttentionNames
    norms: tuple[str, str, str]
    up: tuple[str, ...]
    down: str
    activation: str
    post: bool = False
    rms: bool = False
    bias: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        """Dotted names of the linear layers of a step: all but those of the encoder's keys and values."""
        own, cross = self.own, self.cross
        return (own.q, own.k, own.v, own.o, cross.q, cross.o, *self.up, self.down)

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of all that the layer must have."""
        attention = (self.own.module, self.cross.module, self.cross.k, self.cross.v)
        return (*attention, *self.linears, *self.norms, self.activation)


def _attention(module: str, q: str, k: str, v: str, o: str) -> AttentionNames:
    return AttentionNames(module, *(f"{module}.{name}" for name in (q, k, v, o)))


_PROJ = ("q_proj", "k_proj", "v_proj", "out_proj")
_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
_BEFORE = CrossForm(
    _attention("self_attn", *_PROJ), _attention("encoder_attn", *_PROJ), _NORMS, ("fc1",), "fc2", "activation_fn"
)
_AFTER = replace(_BEFORE, post=True)
_T5_MLP = "layer.2.DenseReluDense"
_T5 = CrossForm(
    _attention("layer.0.SelfAttention", *"qkvo"), _attention("layer.1.EncDecAttention", *"qkvo"),
    ("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"), (f"{_T5_MLP}.wi",), f"{_T5_MLP}.wo",
    f"{_T5_MLP}.act", rms=True, bias=True,
)  # fmt: skip
_T5_GATED = replace(_T5, up=(f"{_T5_MLP}.wi_0", f"{_T5_MLP}.wi_1"))

#: class of a decoder layer in transformers -> its forms; the one whose names are there is taken
FORMS: Mapping[str, tuple[CrossForm, ...]] = MappingProxyType(
    dict.fromkeys(("BartDecoderLayer", "MarianDecoderLayer", "PLBartDecoderLayer"), (_AFTER,))
    | {"BlenderbotSmallDecoderLayer": (_AFTER,)}
    | dict.fromkeys(("MBartDecoderLayer", "M2M100DecoderLayer", "PegasusDecoderLayer"), (_BEFORE,))
    | dict.fromkeys(("BlenderbotDecoderLayer", "WhisperDecoderLayer", "Speech2TextDecoderLayer"), (_BEFORE,))
    | dict.fromkeys(("T5Block", "MT5Block"), (_T5, _T5_GATED))
)


@dataclass(frozen=True)
class Ends:
    """What a model computes around its decoder's layers. Dotted names in the decoder, but for decoder and head.

        x = embedding_norm(scale * embedding[token] + positions[offset + place]);  layers;  head(factor * norm(x))

    scale: of a number. positions: of an embedding, or of its tensor; where `padded`, place 0 is row p + 1 for the id p
    of padding, whose own row is p. masked: whether tokens of the encoder that a mask hides are hidden. factor: the
    setting of the configuration by which the width's inverse square root is one. None: there is none.
    """

    decoder: str = "model.decoder"
    head: str = "lm_head"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    scale: str | None = "embed_tokens.embed_scale"
    positions: str | None = "embed_positions.weight"
    offset: int = 0
    padded: bool = False
    embedding_norm: str | None = None
    norm: str | None = "layer_norm"
    masked: bool = True
    factor: str | None = None


_BART_ENDS = Ends(offset=2, embedding_norm="layernorm_embedding", norm=None)
_T5_ENDS = Ends("decoder", layers="block", scale=None, positions=None, norm="final_layer_norm")

#: class of a model in transformers -> what it computes around its decoder's layers
ENDS: Mapping[str, Ends] = MappingProxyType(
    {
        "BartForConditionalGeneration": _BART_ENDS,
        "PLBartForConditionalGeneration": _BART_ENDS,
        "MBartForConditionalGeneration": replace(_BART_ENDS, norm="layer_norm"),
        "MarianMTModel": Ends(scale="embed_scale", norm=None),
        "PegasusForConditionalGeneration": Ends(scale="embed_scale"),
        "BlenderbotForConditionalGeneration": Ends(),
        "M2M100ForConditionalGeneration": Ends(positions="embed_positions.weights", padded=True),
        "WhisperForConditionalGeneration": Ends(head="proj_out", scale=None, masked=False),
        "T5ForConditionalGeneration": replace(_T5_ENDS, factor="scale_decoder_outputs"),
        "MT5ForConditionalGeneration": _T5_ENDS,
    }
)


def is_cross_layer(layer: Any) -> bool:
    """Whether a layer is of a class that is known; T5's encoder has layers of the same class."""
    return class_of(layer) in FORMS and bool(getattr(layer, "is_decoder", True))


def cross_form_of(layer: Any) -> CrossForm | None:
    """The form of a decoder layer of an encoder-decoder; None where its class has none, or it has another form."""
    if not is_cross_layer(layer):
        return None
    return next((form for form in FORMS[class_of(layer)] if _fits(layer, form)), None)


def _fits(layer: Any, form: CrossForm) -> bool:
    given = {name: part_of(layer, name) for name in form.names}
    if any(one is None for one in given.values()):
        return False
    norms = [getattr(type(given[name]), "replaced_class", type(given[name])) for name in form.norms]
    if form.rms:
        return all(norm.__name__.endswith("LayerNorm") and norm is not nn.LayerNorm for norm in norms)
    return all(norm is nn.LayerNorm for norm in norms)
