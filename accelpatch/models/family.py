"""Model families as data: which module has which role, and what their norms and activations are.

A role's pattern is a glob over dotted names with numbers written `#` (`model.layers.3.mlp` is `model.layers.#.mlp`).
Roles in a model of an unknown family come from its modules' classes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Family:
    """One model family. model_types: its names in transformers. roles: pattern -> role.

    smoothing: groups for activation smoothing: norm -> the linear layers that read its output, within a layer.
    """

    name: str
    model_types: tuple[str, ...]
    roles: Mapping[str, str]
    smoothing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


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

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), _LLAMA, _LLAMA_SMOOTHING),
    Family("mistral", ("mistral",), _LLAMA, _LLAMA_SMOOTHING),
    Family("qwen2", ("qwen2",), _LLAMA, _LLAMA_SMOOTHING),
    Family("qwen3", ("qwen3",), _LLAMA, _LLAMA_SMOOTHING),
    Family("gemma2", ("gemma2",), _LLAMA, _GEMMA_SMOOTHING),
    Family("gemma3", ("gemma3_text", "gemma3"), _LLAMA, _GEMMA_SMOOTHING),
    Family(
        "phi3",
        ("phi3",),
        _attention("self_attn", qkv_proj="qkv_proj", o_proj="o_proj")
        | {"*.mlp.gate_up_proj": "gate_up_proj", "*.mlp.down_proj": "down_proj", "*layers.#.mlp": "mlp"}
        | _LAYER,
        {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
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
    ),
    Family(
        "bloom",
        ("bloom",),
        _FUSED_QKV,
        {"input_layernorm": ("self_attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    ),
    # One norm may feed attention and MLP at once, by version: no smoothing without reading the configuration.
    Family("falcon", ("falcon",), _FUSED_QKV),
    Family("mixtral", ("mixtral",), _SEPARATE | _MOE | _LAYER, {"input_layernorm": _QKV}),
    # Some layers may be dense: their MLP is Llama's, and the `mlp` of a sparse layer is refused by its replacer.
    Family("qwen3_moe", ("qwen3_moe",), _LLAMA | _MOE, {"input_layernorm": _QKV}),
)


@dataclass(frozen=True)
class Norm:
    """A class of RMSNorm: the name of its epsilon attribute, and whether it multiplies by 1 + weight (plus_one)."""

    eps: str
    plus_one: bool = False


RMS_NORMS: Mapping[str, Norm] = MappingProxyType(
    {
        name: Norm("variance_epsilon")
        for name in (
            "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "MixtralRMSNorm",
            "Qwen3MoeRMSNorm",
        )
    }
    | {name: Norm("eps", plus_one=True) for name in ("Gemma2RMSNorm", "Gemma3RMSNorm")}
)  # fmt: skip

# Linear layers whose forward is x @ weight^T + bias: torch's own, and the same written otherwise.
LINEAR_CLASSES = frozenset({"Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear"})
# Embeddings whose forward is a row of the table, times `embed_scale` where they have one.
EMBEDDING_CLASSES = frozenset({"Embedding", "Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding"})
# Rotary embeddings whose tables hold each half's frequencies twice over, in the dtype of the hidden states. Others
# interleave them (Cohere) or stay in float32 (OLMo 2).
ROTARY_CLASSES = frozenset(
    f"{family}RotaryEmbedding"
    for family in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "GPTNeoX", "Falcon", "Mixtral", "Qwen3Moe",
        "StableLm",
    )
)  # fmt: skip
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


def roles_of(config: Any) -> Mapping[str, str]:
    """The role table for a configuration; empty for an unknown family."""
    family = family_of(config)
    return family.roles if family else {}
