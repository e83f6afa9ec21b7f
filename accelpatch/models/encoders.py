"""Encoder layers as data: what each class of transformers computes, by the dotted names of its modules.

A class may have several forms, since releases of transformers name its children differently; the form whose names
exist in the layer is used. To add a class: a row in FORMS, and one in tests/fusion/test_encoders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from accelpatch import own_code


@dataclass(frozen=True)
class EncoderForm:
    """What a layer of an encoder computes, by dotted names in it.

        post    y = norm1(x + o(attention(qkv(x))));        norm2(y + down(activation(up(y))))
        else    y = x + s1 o(attention(qkv(norm1(x))));     y + s2 down(activation(up(norm2(y))))

    attention: the module that is passed to the attention function. qkv: the linear layers of q, k and v, or one for all
    three. scales: the vectors s1 and s2; () for none. gated: `up` has the gate's columns first, then those that it
    multiplies. rotary: whether q and k are rotated by the call's position embeddings. bias: name of the argument that
    is added to the scores; attention then computes the matrix of scores. packs: whether each sequence attends to all
    of its tokens and depends on nothing else, so that a batch may run without padding. where: dotted name of an
    attribute -> the value that it has in a layer of this form.
    """

    attention: str
    qkv: tuple[str, ...]
    output: str
    norms: tuple[str, str]
    up: str
    down: str
    activation: str
    post: bool = False
    scales: tuple[str, ...] = ()
    gated: bool = False
    rotary: bool = False
    bias: str | None = None
    packs: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def linears(self) -> tuple[str, ...]:
        """Dotted names of the linear layers."""
        return (*self.qkv, self.output, self.up, self.down)

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of all that the layer must have."""
        return (self.attention, *self.linears, *self.norms, self.activation, *self.scales)


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


_QKV = ("query", "key", "value")
_PROJ = ("q_proj", "k_proj", "v_proj")
_BERT = EncoderForm(
    "attention.self", _under("attention.self", *_QKV), "attention.output.dense",
    ("attention.output.LayerNorm", "output.LayerNorm"), "intermediate.dense", "output.dense",
    "intermediate.intermediate_act_fn", post=True, packs=True,
    where={"chunk_size_feed_forward": 0, "is_decoder": False},
)  # fmt: skip
_MPNET = replace(
    _BERT, attention="attention.attn", qkv=_under("attention.attn", "q", "k", "v"), output="attention.attn.o",
    norms=("attention.LayerNorm", "output.LayerNorm"), bias="position_bias", packs=False, where={},
)  # fmt: skip
_DISTILBERT = EncoderForm(
    "attention", _under("attention", "q_lin", "k_lin", "v_lin"), "attention.out_lin",
    ("sa_layer_norm", "output_layer_norm"), "ffn.lin1", "ffn.lin2", "ffn.activation", post=True, packs=True,
    where={"ffn.chunk_size_feed_forward": 0},
)  # fmt: skip
_VIT = EncoderForm(
    "attention", _under("attention", *_PROJ), "attention.o_proj", ("layernorm_before", "layernorm_after"),
    "mlp.fc1", "mlp.fc2", "mlp.activation_fn",
)  # fmt: skip
_DINO = replace(
    _VIT, norms=("norm1", "norm2"), activation="mlp.activation", scales=("layer_scale1.lambda1", "layer_scale2.lambda1")
)
_DINO_OLD = replace(
    _DINO, attention="attention.attention", qkv=_under("attention.attention", *_QKV), output="attention.output.dense"
)
_CLIP = EncoderForm(
    "self_attn", _under("self_attn", *_PROJ), "self_attn.out_proj", ("layer_norm1", "layer_norm2"), "mlp.fc1",
    "mlp.fc2", "mlp.activation_fn",
)  # fmt: skip
_WAV2VEC2 = EncoderForm(
    "attention", _under("attention", *_PROJ), "attention.out_proj", ("layer_norm", "final_layer_norm"),
    "feed_forward.intermediate_dense", "feed_forward.output_dense", "feed_forward.intermediate_act_fn", post=True,
)  # fmt: skip
_WAV2VEC2_STABLE = replace(_WAV2VEC2, post=False, where={"adapter_layer": None})
_MODERNBERT = EncoderForm(
    "attn", ("attn.Wqkv",), "attn.Wo", ("attn_norm", "mlp_norm"), "mlp.Wi", "mlp.Wo", "mlp.act", gated=True, rotary=True
)

#: class of a layer in transformers -> its forms
FORMS: Mapping[str, tuple[EncoderForm, ...]] = MappingProxyType(
    dict.fromkeys(("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer"), (_BERT,))
    | dict.fromkeys(("CLIPEncoderLayer", "SiglipEncoderLayer"), (_CLIP,))
    | dict.fromkeys(("Wav2Vec2EncoderLayer", "HubertEncoderLayer"), (_WAV2VEC2,))
    | dict.fromkeys(("Wav2Vec2EncoderLayerStableLayerNorm", "HubertEncoderLayerStableLayerNorm"), (_WAV2VEC2_STABLE,))
    | {
        "MPNetLayer": (_MPNET,),
        "TransformerBlock": (_DISTILBERT,),
        "ViTLayer": (_VIT,),
        "Dinov2Layer": (_DINO, replace(_DINO, activation="mlp.activation_fn"), _DINO_OLD),
        "ModernBertEncoderLayer": (_MODERNBERT,),
    }
)
#: classes of encoder layers that have no form -> the reason
UNFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("DebertaLayer", "DebertaV2Layer"),
        "its attention also scores relative positions, by products that depend on the call",
    )
)


def class_of(layer: Any) -> str:
    """The name of transformers' class of a layer, replaced or not."""
    return own_code.base_of(getattr(type(layer), "replaced_class", type(layer))).__name__


def encoder_form_of(layer: Any) -> EncoderForm | None:
    """The form of a layer of an encoder; None where its class has none, or it has another form."""
    return next((form for form in FORMS.get(class_of(layer), ()) if _fits(layer, form)), None)


def why_unfused(layer: Any) -> str | None:
    """Why a layer of a known class has no form; None for a class that is not known, or where it has one."""
    name = class_of(layer)
    if name in FORMS and encoder_form_of(layer) is None:
        return "its settings give it another form than the one that is known of its class"
    return UNFUSED.get(name)


def part_of(layer: Any, name: str) -> Any:
    """The module, parameter or value of a dotted name in a layer; None where it has none."""
    for part in name.split("."):
        layer = getattr(layer, part, None)
    return layer


def _fits(layer: Any, form: EncoderForm) -> bool:
    given = {name: part_of(layer, name) for name in form.names}
    if any(one is None for one in given.values()):
        return False
    norms = (getattr(type(given[name]), "replaced_class", type(given[name])) for name in form.norms)
    if any(norm is not nn.LayerNorm and not (norm is nn.Identity and form.rotary) for norm in norms):
        return False
    return all(part_of(layer, name) == value for name, value in form.where.items())


def layer_roles(model: nn.Module, more: Callable[[Any], bool] = lambda layer: False) -> dict[str, str]:
    """Dotted name with numbers written `#` -> "layer", of the layers of encoders in a model. more: whether a module is
    another layer."""
    known = FORMS.keys() | UNFUSED.keys()
    found = (name for name, module in model.named_modules() if class_of(module) in known or more(module))
    return {".".join("#" if part.isdigit() else part for part in name.split(".")): "layer" for name in found}
