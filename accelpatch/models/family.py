"""Model families as data: everything that differs from family to family. No other file names a model's classes.

To add a family, add a row to `FAMILIES` (roles, and what its layers compute), a tiny model of it to
tests/support/tiny.py, and run tests/models/test_families.py. Roles in a model of an unknown family come from its
modules' classes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Norm:
    """A family's RMSNorm: the name of its epsilon attribute, and whether it multiplies by 1 + weight (plus_one)."""

    eps: str = "variance_epsilon"
    plus_one: bool = False


@dataclass(frozen=True)
class LayerForm:
    """What a decoder layer computes, by the names of its children; it can be fused.

        x = x + after_attention(attention(attention_norm(x)))
        x = x + after_mlp(mlp(mlp_norm(x)))

    after_attention, after_mlp: None where the family has no such norm.
    """

    attention: str = "self_attn"
    mlp: str = "mlp"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @property
    def norms(self) -> Mapping[str, str]:
        """Place of a norm, such as mlp_norm -> name of the child; without the places that have none."""
        places = ("attention_norm", "after_attention", "mlp_norm", "after_mlp")
        return {place: name for place in places if (name := getattr(self, place)) is not None}

    @property
    def children(self) -> frozenset[str]:
        """Names of the children that a layer calls."""
        return frozenset({self.attention, self.mlp, *self.norms.values()})


@dataclass(frozen=True)
class Family:
    """One model family.

    model_types: its names in transformers. roles: pattern -> role; a pattern is a glob over dotted names with numbers
    written `#` (`model.layers.3.mlp` is `model.layers.#.mlp`). smoothing: groups for activation smoothing: norm -> the
    linear layers that read its output, within a layer.

    classes: what its classes' names begin with, such as Llama in LlamaAttention. norm: its RMSNorm. layer: the form of
    its decoder layers. rotary: whether its rotary embedding's tables hold each half's frequencies twice over, in the
    dtype of the hidden states (others interleave them, as Cohere, or stay in float32, as OLMo 2). capped_scores,
    capped_logits: whether it applies the softcaps of its configuration; scores only in eager attention.
    """

    name: str
    model_types: tuple[str, ...]
    roles: Mapping[str, str]
    smoothing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: str = ""
    norm: Norm | None = None
    layer: LayerForm | None = None
    rotary: bool = False
    capped_scores: bool = False
    capped_logits: bool = False


def _attention(prefix: str, **names: str) -> dict[str, str]:
    return {f"*.{prefix}.{attribute}": role for role, attribute in names.items()}


_SEPARATE = _attention("self_attn", q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="o_proj")
_GATED = {
    "*.mlp.gate_proj": "gate_proj",
    "*.mlp.up_proj": "up_proj",
    "*.mlp.down_proj": "down_proj",
    "*layers.#.mlp": "mlp",
}
_LAYER = {"*layers.#": "layer"}
_LLAMA = _SEPARATE | _GATED | _LAYER
_MOE = {"*.mlp.gate": "router", "*.mlp.experts": "experts"}
_FUSED_QKV = {
    "*.query_key_value": "qkv_proj",
    "*.attention.dense": "o_proj",
    "*.self_attention.dense": "o_proj",
    "*.mlp.dense_h_to_4h": "fc1",
    "*.mlp.dense_4h_to_h": "fc2",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA_SMOOTHING = {
    "input_layernorm": _QKV,
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_GEMMA_SMOOTHING = {
    "input_layernorm": _QKV,
    "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}

_LLAMA_FORM: dict[str, Any] = {"norm": Norm(), "layer": LayerForm(), "rotary": True}
_GEMMA_FORM: dict[str, Any] = {
    "norm": Norm("eps", plus_one=True),
    "layer": LayerForm(
        mlp_norm="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "rotary": True,
    "capped_logits": True,
}

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), _LLAMA, _LLAMA_SMOOTHING, "Llama", **_LLAMA_FORM),
    Family("mistral", ("mistral",), _LLAMA, _LLAMA_SMOOTHING, "Mistral", **_LLAMA_FORM),
    Family("qwen2", ("qwen2",), _LLAMA, _LLAMA_SMOOTHING, "Qwen2", **_LLAMA_FORM),
    Family("qwen3", ("qwen3",), _LLAMA, _LLAMA_SMOOTHING, "Qwen3", **_LLAMA_FORM),
    Family("gemma2", ("gemma2",), _LLAMA, _GEMMA_SMOOTHING, "Gemma2", **_GEMMA_FORM, capped_scores=True),
    # Its attention has a softcap among its attributes and does not use it.
    Family("gemma3", ("gemma3_text", "gemma3"), _LLAMA, _GEMMA_SMOOTHING, "Gemma3", **_GEMMA_FORM),
    Family(
        "phi3",
        ("phi3",),
        _attention("self_attn", qkv_proj="qkv_proj", o_proj="o_proj")
        | {"*.mlp.gate_up_proj": "gate_up_proj", "*.mlp.down_proj": "down_proj", "*layers.#.mlp": "mlp"}
        | _LAYER,
        {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        "Phi3",
        **_LLAMA_FORM,
    ),
    Family(
        "opt",
        ("opt",),
        _attention("self_attn", q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
        | {"*layers.#.fc1": "fc1", "*layers.#.fc2": "fc2"},
        {
            "self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "final_layer_norm": ("fc1",),
        },
    ),
    Family(
        "gpt2",
        ("gpt2",),
        _attention("attn", qkv_proj="c_attn", o_proj="c_proj") | {"*.mlp.c_fc": "fc1", "*.mlp.c_proj": "fc2"},
        {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
    ),
    Family(
        "gpt_neox",
        ("gpt_neox",),
        _FUSED_QKV,
        {"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
        "GPTNeoX",
        rotary=True,
    ),
    Family(
        "bloom",
        ("bloom",),
        _FUSED_QKV,
        {"input_layernorm": ("self_attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    ),
    # One norm may feed attention and MLP at once, by version: no smoothing without reading the configuration.
    Family("falcon", ("falcon",), _FUSED_QKV, classes="Falcon", rotary=True),
    Family("stablelm", ("stablelm",), _LLAMA, classes="StableLm", rotary=True),
    Family("mixtral", ("mixtral",), _SEPARATE | _MOE | _LAYER, {"input_layernorm": _QKV}, "Mixtral", **_LLAMA_FORM),
    # Some layers may be dense: their MLP is Llama's, and the `mlp` of a sparse layer is refused by its replacer.
    Family("qwen3_moe", ("qwen3_moe",), _LLAMA | _MOE, {"input_layernorm": _QKV}, "Qwen3Moe", **_LLAMA_FORM),
)
_BY_CLASSES: Mapping[str, Family] = MappingProxyType({family.classes: family for family in FAMILIES if family.classes})

# Linear layers whose forward is x @ weight^T + bias: torch's own, and the same written otherwise.
LINEAR_CLASSES = frozenset({"Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear"})
# Embeddings whose forward is a row of the table, times `embed_scale` where they have one.
EMBEDDING_CLASSES = frozenset({"Embedding", "Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding"})
# Rope types whose frequencies are fixed when the model is made.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
# Classes of activation modules -> the name that configurations use.
ACTIVATION_CLASSES: Mapping[str, str] = MappingProxyType(
    {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu"}
)


def family_of(config: Any) -> Family | None:
    """The family of a configuration, by its model_type or that of its text part; None for an unknown one."""
    types = [getattr(config, "model_type", None)]
    if hasattr(config, "get_text_config"):
        types.append(getattr(config.get_text_config(decoder=True), "model_type", None))
    return next((family for family in FAMILIES for name in types if name in family.model_types), None)


def family_of_class(module: Any, ending: str) -> Family | None:
    """The family that a module's class belongs to, by its name: LlamaAttention with the ending Attention is Llama's."""
    name = type(module).__name__
    return _BY_CLASSES.get(name.removesuffix(ending)) if name.endswith(ending) else None


def norm_of(module: Any) -> Norm | None:
    """What a family's RMSNorm computes; None for any other module."""
    family = family_of_class(module, "RMSNorm")
    return None if family is None else family.norm


def form_of(layer: Any) -> LayerForm | None:
    """The form of a decoder layer, by the class of its norms; None where it is not known or a child is missing."""
    family = family_of_class(getattr(layer, "input_layernorm", None), "RMSNorm")
    if family is None or family.layer is None or not all(hasattr(layer, name) for name in family.layer.children):
        return None
    norms = [getattr(layer, name) for name in family.layer.norms.values()]
    return family.layer if all(family_of_class(norm, "RMSNorm") is family for norm in norms) else None


def roles_of(config: Any) -> Mapping[str, str]:
    """The role table for a configuration; empty for an unknown family."""
    family = family_of(config)
    return family.roles if family else {}
