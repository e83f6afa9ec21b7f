"""Model families as data: everything that differs from family to family. No other file names a model's classes.

To add a family, add a row to `FAMILIES` (roles, and what its layers compute), a tiny model of it to
tests/support/tiny.py, and run tests/models/test_families.py. Roles in a model of an unknown family come from its
modules' classes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from accelpatch.models.form import Family, LayerForm, Norm, Rotary

__all__ = [
    "ACTIVATION_CLASSES", "EMBEDDING_CLASSES", "FAMILIES", "LINEAR_CLASSES", "STATIC_ROPE", "Family", "LayerForm",
    "Norm", "Rotary", "family_of", "family_of_class", "form_of", "norm_of", "roles_of",
]  # fmt: skip


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
_MLP_OF_TWO = {"*.mlp.gate_up_proj": "gate_up_proj", "*.mlp.down_proj": "down_proj", "*layers.#.mlp": "mlp"}
_GATE_UP = _SEPARATE | _MLP_OF_TWO | _LAYER
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

_LLAMA_FORM: dict[str, Any] = {"norm": Norm(), "layer": LayerForm(), "rotary": Rotary()}
_POST_NORM = LayerForm(
    attention_norm=None,
    mlp_norm=None,
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GEMMA_FORM: dict[str, Any] = {
    "norm": Norm("eps", plus_one=True),
    "layer": replace(_POST_NORM, attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
    "rotary": Rotary(),
    "capped_logits": True,
}
_GLM4_LAYER = LayerForm(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), _LLAMA, _LLAMA_SMOOTHING, "Llama", **_LLAMA_FORM),
    Family("mistral", ("mistral",), _LLAMA, _LLAMA_SMOOTHING, "Mistral", **_LLAMA_FORM),
    Family("ministral", ("ministral",), _LLAMA, _LLAMA_SMOOTHING, "Ministral", **_LLAMA_FORM),
    Family("qwen2", ("qwen2",), _LLAMA, _LLAMA_SMOOTHING, "Qwen2", **_LLAMA_FORM),
    Family("qwen3", ("qwen3",), _LLAMA, _LLAMA_SMOOTHING, "Qwen3", **_LLAMA_FORM),
    Family(
        "smollm3",
        ("smollm3",),
        _LLAMA,
        _LLAMA_SMOOTHING,
        "SmolLM3",
        **_LLAMA_FORM | {"rotary": Rotary(without="use_rope")},
    ),
    Family(
        "granite",
        ("granite",),
        _LLAMA,
        _LLAMA_SMOOTHING,
        "Granite",
        **_LLAMA_FORM | {"layer": LayerForm(multiplier="residual_multiplier")},
        embedding_multiplier="embedding_multiplier",
        logit_divisor="logits_scaling",
    ),
    Family(
        "helium",
        ("helium",),
        _LLAMA,
        _LLAMA_SMOOTHING,
        "Helium",
        Norm(late=True),
        LayerForm(),
        Rotary(interleaved=True),
    ),
    Family(
        "ernie4_5",
        ("ernie4_5",),
        _LLAMA,
        _LLAMA_SMOOTHING,
        "Ernie4_5",
        Norm(),
        LayerForm(),
        Rotary(wide=True, interleaved=True),
    ),
    Family("olmo2", ("olmo2",), _LLAMA, {}, "Olmo2", Norm(late=True), _POST_NORM, Rotary(wide=True), q_k_norm="all"),
    Family("gemma", ("gemma",), _LLAMA, _LLAMA_SMOOTHING, "Gemma", Norm("eps", plus_one=True), LayerForm(), Rotary()),
    Family("gemma2", ("gemma2",), _LLAMA, _GEMMA_SMOOTHING, "Gemma2", **_GEMMA_FORM, capped_scores=True),
    # Its attention has a softcap among its attributes and does not use it.
    Family("gemma3", ("gemma3_text", "gemma3"), _LLAMA, _GEMMA_SMOOTHING, "Gemma3", **_GEMMA_FORM),
    Family("glm", ("glm",), _GATE_UP, {}, "Glm", Norm(), LayerForm(), Rotary(interleaved=True)),
    Family("glm4", ("glm4",), _GATE_UP, {}, "Glm4", Norm(), _GLM4_LAYER, Rotary(interleaved=True)),
    Family(
        "phi3",
        ("phi3",),
        _attention("self_attn", qkv_proj="qkv_proj", o_proj="o_proj") | _MLP_OF_TWO | _LAYER,
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
        rotary=Rotary(),
    ),
    Family(
        "bloom",
        ("bloom",),
        _FUSED_QKV,
        {"input_layernorm": ("self_attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    ),
    # One norm may feed attention and MLP at once, by version: no smoothing without reading the configuration.
    Family("falcon", ("falcon",), _FUSED_QKV, classes="Falcon", rotary=Rotary()),
    Family("stablelm", ("stablelm",), _LLAMA, classes="StableLm", rotary=Rotary()),
    Family("mixtral", ("mixtral",), _SEPARATE | _MOE | _LAYER, {"input_layernorm": _QKV}, "Mixtral", **_LLAMA_FORM),
    # Some layers may be dense: their MLP is Llama's, and the `mlp` of a sparse layer is refused by its replacer.
    Family("qwen3_moe", ("qwen3_moe",), _LLAMA | _MOE, {"input_layernorm": _QKV}, "Qwen3Moe", **_LLAMA_FORM),
)
_BY_CLASSES: Mapping[str, Family] = MappingProxyType({family.classes: family for family in FAMILIES if family.classes})

# Linear layers whose forward is x @ weight^T + bias: torch's own, and the same written otherwise.
LINEAR_CLASSES = frozenset({"Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear"})
# Embeddings whose forward is a row of the table, times `embed_scale` where they have one.
EMBEDDING_CLASSES = frozenset(
    {"Embedding", "GemmaTextScaledWordEmbedding", "Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding"}
)
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
    """The family that a module's class belongs to, by its name: LlamaAttention with the ending Attention is Llama's.

    Of a replacement the class that it replaced counts.
    """
    name = getattr(type(module), "replaced_class", type(module)).__name__
    return _BY_CLASSES.get(name.removesuffix(ending)) if name.endswith(ending) else None


def norm_of(module: Any) -> Norm | None:
    """What a family's RMSNorm computes; None for any other module."""
    family = family_of_class(module, "RMSNorm")
    return None if family is None else family.norm


def form_of(layer: Any) -> LayerForm | None:
    """The form of a decoder layer, by the classes of its norms or its attention; None where it is not known, a child is
    missing, or a norm is of another family."""
    first = family_of_class(getattr(layer, "input_layernorm", None), "RMSNorm")
    family = first or family_of_class(getattr(layer, "self_attn", None), "Attention")
    if family is None or family.layer is None or not all(hasattr(layer, name) for name in family.layer.children):
        return None
    norms = [getattr(layer, name) for name in family.layer.norms.values()]
    return family.layer if all(family_of_class(norm, "RMSNorm") is family for norm in norms) else None


def roles_of(config: Any) -> Mapping[str, str]:
    """The role table for a configuration; empty for an unknown family."""
    family = family_of(config)
    return family.roles if family else {}
