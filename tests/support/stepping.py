"""A native decode step made from a transformers model, for tests; and the model that it must agree with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.step_weights import LayerWeights, NormWeight, StepShape
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.pack_tensors import in_one_block
from accelpatch.kernels.ops.linear import packed_linear
from accelpatch.quant import int4, int8

Quantize = Callable[[Tensor, Tensor | None], Pack]
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def as_int8(weight: Tensor, bias: Tensor | None) -> Pack:
    made = int8.quantize(weight, group_size=None)
    return Pack.pack(made.w, made.scale, bits=8, bias=bias)


def as_int4(weight: Tensor, bias: Tensor | None) -> Pack:
    made = int4.quantize(weight, group_size=32, symmetric=False)
    return Pack.pack(made.w, made.scale, made.offset, bits=4, bias=bias)


def as_dense(weight: Tensor, bias: Tensor | None) -> Pack:
    return Pack.dense(weight, bias)


FORMATS: dict[str, Quantize] = {"int8": as_int8, "int4": as_int4, "float32": as_dense}


def weights_of(pack: Pack) -> Tensor:
    """The pack's weight in float64, exactly."""
    if pack.offset == "none" and pack.data.dtype == torch.float32:
        return pack.data.double()
    if pack.order is not None or pack.codes or pack.form is not None or pack.offset == "zero_point":
        return packed_linear.dense(torch.float64, *pack.arguments(), None)[0]
    q, scale, offset = pack.unpack()
    u = q.double() if pack.kind != 2 else torch.stack((q & 15, (q >> 4) & 15), dim=-1).flatten(-2).double()
    if pack.kind == 2 and offset is None:
        u -= 8
    w = u.unflatten(1, (scale.shape[1], -1)) * scale.double().unsqueeze(2)
    return (w if offset is None else w + offset.double().unsqueeze(2)).flatten(1)


def build(model: PreTrainedModel, quantize: Quantize, max_batch: int, length: int) -> DecodeStep:
    """The step of a Llama-like model (Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3 text)."""
    config = model.config.get_text_config(decoder=True)
    decoder, gemma = model.get_decoder(), config.model_type.startswith("gemma")
    plus_one = 1.0 if gemma else 0.0
    packs = {id(decoder.embed_tokens.weight): quantize(decoder.embed_tokens.weight, None)}
    embedding = packs[id(decoder.embed_tokens.weight)]
    head = packs.get(id(model.lm_head.weight)) or quantize(model.lm_head.weight, None)
    rope = ropes(decoder.rotary_emb)
    names = list(rope)
    layers = [layer_weights(layer, config, quantize, plus_one, names) for layer in decoder.layers]
    order = [pack for layer in layers for pack in layer.linears.values()] + [head]
    moved = dict(zip(map(id, order), in_one_block(order), strict=True))
    layers = [
        replace(layer, linears={name: moved[id(pack)] for name, pack in layer.linears.items()}) for layer in layers
    ]
    embedding, head = moved.get(id(embedding), embedding), moved[id(head)]
    attention = decoder.layers[0].self_attn
    keys = torch.full((len(layers), max_batch, config.num_key_value_heads, length, attention.head_dim), float("nan"))
    shape = StepShape(
        config.hidden_size, attention.head_dim, tuple(rope.values()), config.hidden_size**0.5 if gemma else 1.0,
        getattr(config, "final_logit_softcapping", None) or 0.0,
    )  # fmt: skip
    norm = NormWeight(decoder.norm.weight + plus_one, config.rms_norm_eps)
    return DecodeStep(shape, layers, embedding, head, norm, keys, keys.clone())


def ropes(rotary: nn.Module) -> dict[str, tuple[Tensor, float]]:
    """The rotary frequencies by layer type; one "" where all layers share them."""
    if hasattr(rotary, "inv_freq"):
        return {"": (rotary.inv_freq, rotary.attention_scaling)}
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in rotary.layer_types
    }


def layer_weights(
    layer: nn.Module, config: object, quantize: Quantize, plus_one: float, ropes: list[str]
) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    modules = {
        "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj,
        "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj,
    }  # fmt: skip
    four = hasattr(layer, "pre_feedforward_layernorm")
    norms = {
        "attention_norm": layer.input_layernorm,
        "after_attention_norm": layer.post_attention_layernorm if four else None,
        "mlp_norm": layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm,
        "after_mlp_norm": layer.post_feedforward_layernorm if four else None,
        "q_norm": getattr(attention, "q_norm", None),
        "k_norm": getattr(attention, "k_norm", None),
    }
    kind = getattr(attention, "layer_type", None) or ""
    return LayerWeights(
        {name: quantize(module.weight, module.bias) for name, module in modules.items()},
        {
            name: NormWeight(norm.weight.detach() + plus_one, config.rms_norm_eps)
            for name, norm in norms.items()
            if norm is not None
        },
        ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
        attention.scaling,
        (attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None))
        or 0,
        ropes.index(kind) if kind in ropes else 0,
        getattr(config, "attn_logit_softcapping", None) or 0.0,
    )


def rounded(model: PreTrainedModel, step: DecodeStep, dtype: torch.dtype) -> PreTrainedModel:
    """The model with the weights that the step's packs stand for, in `dtype`. Changes the model in place."""
    model.to(dtype)
    decoder = model.get_decoder()
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(weights_of(step.embedding))
        model.lm_head.weight.copy_(weights_of(step.head))
        for layer, packed in zip(decoder.layers, step.layers, strict=True):
            for name, pack in packed.linears.items():
                owner = layer.self_attn if name in ("q", "k", "v", "o") else layer.mlp
                getattr(owner, f"{name}_proj").weight.copy_(weights_of(pack))
    return model
