"""Model families as data: everything that differs from family to family. No other file names a model's classes.

To add one: docs/contributing/add-a-family.md. Roles in a model of an unknown family come from its modules' classes
alone. Look-ups are in family.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from accelpatch.models.form import DecoderForm, Family, LayerForm, Norm, Rotary, Smoothing, Sparse
from accelpatch.models.groups import (
    BEHIND,
    COHERE_SMOOTHING,
    GATE_UP_SMOOTHING,
    GEMMA_SMOOTHING,
    LLAMA_SMOOTHING,
    MOE_SMOOTHING,
    PHI3_SMOOTHING,
    QKV,
    SOME_DENSE,
    STABLELM_SMOOTHING,
    TWO_NORMS,
    VALUES,
    by_one,
)


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
_FUSEDQKV = {
    "*.query_key_value": "qkv_proj",
    "*.self_attention.dense": "o_proj",
    "*.mlp.dense_h_to_4h": "fc1",
    "*.mlp.dense_4h_to_h": "fc2",
}
_LLAMA_FORM: dict[str, Any] = {"norm": Norm(), "layer": LayerForm(), "rotary": Rotary()}
_AXES_FORM = _LLAMA_FORM | {"rotary": Rotary(tables="axes")}
_CYCLIC_FORM = _LLAMA_FORM | {"rotary": Rotary(tables="cyclic axes")}
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
LAYER_NORM = Norm("eps", layer=True)  # torch's
_COHERE_FORM: dict[str, Any] = {
    "norm": Norm(layer=True),
    "layer": LayerForm(mlp_norm="input_layernorm", parallel=True),
    "rotary": Rotary(tables="paired", interleaved=True),
    "logit_multiplier": "logit_scale",
}
# Why tensor parallel does not split a family.
_OVER_ALL = "its queries and keys are normalised over all heads"
_FALCON = "the order of q, k and v in its one linear layer differs from version to version"
_LATENT = "its keys and values are made of a compressed cache (MLA), which fused layers do not read"
_GLM4_LAYER = LayerForm(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")

FAMILIES: tuple[Family, ...] = (
    Family("llama", _LLAMA, LLAMA_SMOOTHING, "Llama", **_LLAMA_FORM),
    Family("mistral", _LLAMA, LLAMA_SMOOTHING, "Mistral", **_LLAMA_FORM),
    Family("ministral", _LLAMA, LLAMA_SMOOTHING, "Ministral", **_LLAMA_FORM),
    Family("qwen2", _LLAMA, LLAMA_SMOOTHING, "Qwen2", **_LLAMA_FORM),
    Family("qwen3", _LLAMA, LLAMA_SMOOTHING, "Qwen3", **_LLAMA_FORM),
    Family("qwen2_vl_text", _LLAMA, LLAMA_SMOOTHING, "Qwen2VL", **_AXES_FORM, also=("qwen2_vl",)),
    Family("qwen2_5_vl_text", _LLAMA, LLAMA_SMOOTHING, "Qwen2_5_VL", **_AXES_FORM, also=("qwen2_5_vl",)),
    Family("qwen3_vl_text", _LLAMA, LLAMA_SMOOTHING, "Qwen3VLText", **_CYCLIC_FORM, also=("qwen3_vl",)),
    Family("smollm3", _LLAMA, LLAMA_SMOOTHING, "SmolLM3", **_LLAMA_FORM | {"rotary": Rotary(without="use_rope")}),
    Family(
        "granite",
        _LLAMA,
        LLAMA_SMOOTHING,
        "Granite",
        **_LLAMA_FORM | {"layer": LayerForm(multiplier="residual_multiplier")},
        embedding_multiplier="embedding_multiplier",
        logit_divisor="logits_scaling",
    ),
    Family("helium", _LLAMA, LLAMA_SMOOTHING, "Helium", Norm(late=True), LayerForm(), Rotary(interleaved=True)),
    Family(
        "ernie4_5", _LLAMA, LLAMA_SMOOTHING, "Ernie4_5", Norm(), LayerForm(), Rotary(tables="float32", interleaved=True)
    ),
    Family(
        "olmo2",
        _LLAMA,
        BEHIND,
        "Olmo2",
        Norm(late=True),
        _POST_NORM,
        Rotary(tables="float32"),
        q_k_norm="all",
        unsharded=_OVER_ALL,
    ),
    Family("gemma", _LLAMA, LLAMA_SMOOTHING, "Gemma", Norm("eps", plus_one=True), LayerForm(), Rotary()),
    Family("gemma2", _LLAMA, GEMMA_SMOOTHING, "Gemma2", **_GEMMA_FORM, capped_scores=True),
    # Its attention has a softcap among its attributes and does not use it.
    Family("gemma3", _LLAMA, GEMMA_SMOOTHING, "Gemma3", **_GEMMA_FORM, also=("gemma3_text",)),
    Family("glm", _GATE_UP, GATE_UP_SMOOTHING, "Glm", Norm(), LayerForm(), Rotary(interleaved=True)),
    Family("glm4", _GATE_UP, GATE_UP_SMOOTHING, "Glm4", Norm(), _GLM4_LAYER, Rotary(interleaved=True)),
    Family(
        "phi3",
        _attention("self_attn", qkv_proj="qkv_proj", o_proj="o_proj") | _MLP_OF_TWO | _LAYER,
        PHI3_SMOOTHING,
        "Phi3",
        **_LLAMA_FORM,
    ),
    Family(
        "opt",
        _attention("self_attn", q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
        | {"*layers.#.fc1": "fc1", "*layers.#.fc2": "fc2"}
        | _LAYER,
        (
            Smoothing("self_attn_layer_norm", QKV, {"do_layer_norm_before": True}),
            Smoothing("self_attn.v_proj", ("self_attn.out_proj",)),
            Smoothing("final_layer_norm", ("fc1",), {"do_layer_norm_before": True}),
            Smoothing("fc1", ("fc2",), {"activation_function": "relu"}),  # relu(x / s) is relu(x) / s
        ),
        "OPT",
        LAYER_NORM,
        LayerForm(
            mlp=None, attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm", where="do_layer_norm_before"
        ),
        decoder=DecoderForm(
            "model.decoder", norm="final_layer_norm", positions="embed_positions", offset=2, of_mask=True
        ),
    ),
    Family(
        "gpt2",
        _attention("attn", qkv_proj="c_attn", o_proj="c_proj")
        | {"*.mlp.c_fc": "fc1", "*.mlp.c_proj": "fc2", "*.h.#": "layer"},
        by_one("attn", "c_attn", "c_proj", ("ln_1", "ln_2"), "mlp.c_fc"),
        "GPT2",
        LAYER_NORM,
        LayerForm("attn", attention_norm="ln_1", mlp_norm="ln_2"),
        decoder=DecoderForm("transformer", "h", "wte", "ln_f", positions="wpe"),
    ),
    Family(
        "gpt_neox",
        _attention("attention", qkv_proj="query_key_value", o_proj="dense")
        | {"*.mlp.dense_h_to_4h": "fc1", "*.mlp.dense_4h_to_h": "fc2"}
        | _LAYER,
        by_one("attention", "query_key_value", "dense", TWO_NORMS, "mlp.dense_h_to_4h"),
        "GPTNeoX",
        LAYER_NORM,
        LayerForm("attention", parallel="use_parallel_residual", cache="layer_past"),
        Rotary(),
        by_head=True,
        decoder=DecoderForm("gpt_neox", embedding="embed_in", norm="final_layer_norm"),
    ),
    Family(
        "phi",
        _attention("self_attn", q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="dense")
        | {"*.mlp.fc1": "fc1", "*.mlp.fc2": "fc2"}
        | _LAYER,
        (Smoothing("input_layernorm", (*QKV, "mlp.fc1")), Smoothing("self_attn.v_proj", ("self_attn.dense",))),
        classes="Phi",
        norm=LAYER_NORM,
        layer=LayerForm(mlp_norm="input_layernorm", parallel=True),
        rotary=Rotary(),
        decoder=DecoderForm(norm="final_layernorm"),
    ),
    Family(
        "starcoder2",
        _SEPARATE | {"*.mlp.c_fc": "fc1", "*.mlp.c_proj": "fc2"} | _LAYER,
        (Smoothing("input_layernorm", QKV), VALUES, Smoothing("post_attention_layernorm", ("mlp.c_fc",))),
        "Starcoder2",
        LAYER_NORM,
        LayerForm(),
        Rotary(),
    ),
    Family(
        "bloom",
        _FUSEDQKV,
        by_one(
            "self_attention",
            "query_key_value",
            "dense",
            TWO_NORMS,
            "mlp.dense_h_to_4h",
            apply_residual_connection_post_layernorm=False,
        ),
        "Bloom",
        by_head=True,
        unfused="its scores get a bias by distance (ALiBi), which the attention kernels do not add",
        unsharded="its scores get a bias that differs from head to head, and is made for all heads at once",
    ),
    # One norm may feed attention and MLP at once, by version: no smoothing without reading the configuration.
    Family("falcon", _FUSEDQKV, classes="Falcon", rotary=Rotary(), unsharded=_FALCON),
    Family(
        "stablelm",
        _LLAMA,
        STABLELM_SMOOTHING,
        classes="StableLm",
        norm=LAYER_NORM,
        layer=LayerForm(parallel="use_parallel_residual"),
        rotary=Rotary(),
    ),
    Family("cohere", _LLAMA, COHERE_SMOOTHING, "Cohere", **_COHERE_FORM),
    Family(
        "cohere2",
        _LLAMA,
        COHERE_SMOOTHING,
        "Cohere2",
        **_COHERE_FORM | {"rotary": replace(_COHERE_FORM["rotary"], without="sliding_window")},
    ),
    Family("mixtral", _SEPARATE | _MOE | _LAYER, MOE_SMOOTHING, "Mixtral", **_LLAMA_FORM, sparse=Sparse()),
    Family(
        "olmoe",
        _SEPARATE | _MOE | _LAYER,
        MOE_SMOOTHING,
        "Olmoe",
        **_LLAMA_FORM,
        q_k_norm="all",
        sparse=Sparse(normalise="norm_topk_prob", narrow=True),
        unsharded=_OVER_ALL,
    ),
    # Some layers may be dense: their MLP is Llama's, and the `mlp` of a sparse layer is refused by its replacer.
    Family(
        "qwen3_moe",
        _LLAMA | _MOE,
        SOME_DENSE,
        "Qwen3Moe",
        **_LLAMA_FORM,
        sparse=Sparse(normalise="norm_topk_prob", narrow=True),
    ),
    # Its experts' gate and up alternate, and its router's softmax is over the chosen experts alone, which is the same.
    Family(
        "gpt_oss",
        _SEPARATE | {"*.mlp.router": "router", "*.mlp.experts": "experts"} | _LAYER,
        classes="GptOss",
        norm=Norm(late=True),
        layer=LayerForm(),
        rotary=Rotary(tables="half"),
        sparse=Sparse("router", narrow=True, block="MLP", bias=True),
        unsharded="its heads have sinks, and its experts have biases",
    ),
    Family("deepseek_v2", _LLAMA | _MOE, classes="DeepseekV2", norm=Norm(), layer=LayerForm(), unfused=_LATENT),
    Family("deepseek_v3", _LLAMA | _MOE, classes="DeepseekV3", norm=Norm(), layer=LayerForm(), unfused=_LATENT),
)

# Linear layers whose forward is x @ weight^T + bias: torch's own, and the same written otherwise.
LINEAR_CLASSES = frozenset({"Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear"})
# Embeddings whose forward is a row of the table, times `embed_scale` where they have one.
EMBEDDING_CLASSES = frozenset(
    {"Embedding", "GemmaTextScaledWordEmbedding", "Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding"}
)
# Rope types whose frequencies are fixed when the model is made.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
# Experts whose gate is (up + 1) * g * sigmoid(alpha g), gate and up clamped by `limit`.
CLAMPED_GATES = frozenset({"GptOssExperts"})
# Classes of activation modules -> the name that configurations use.
ACTIVATION_CLASSES: Mapping[str, str] = MappingProxyType(
    {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu"}
)
# The same for MLPs without a gate, which are not replaced: others are within roundings of torch's own.
PLAIN_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {**ACTIVATION_CLASSES, "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh"}
)
