"""Reads the fused layers of a patched model off its replaced modules."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from accelpatch.device import probe
from accelpatch.fusion import attention_facts
from accelpatch.fusion.adapters import Adapted, active, base_of, with_adapters
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_layer import FusedLayer
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.fused_weights import concatenated_linear, fused_linear, gated_linear
from accelpatch.fusion.signals import with_signals
from accelpatch.kernels.ops import decode_attention
from accelpatch.kernels.ops.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.ops.fused_linear import FusedLinear, FusedNorm
from accelpatch.kernels.ops.query_key import QueryKey
from accelpatch.models.family import form_of
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.norm import FusedRMSNorm, ResidualNormLayer
from accelpatch.modules.replacement import unchanged

DTYPES = (torch.bfloat16, torch.float16)
NONE: Mapping[int, str] = {}


def fused_model(model: Any, unfused: Mapping[int, str] = NONE) -> FusedModel:
    """The fused layers of a patched model; concatenates their weights.

    unfused: place -> reason, of layers that must run as modules; others that cannot be fused join them. Raises
    CannotFuse where no layer can be fused, or the last norm or head cannot.
    """
    decoder, head = attention_facts.decoder_of(model)
    layers = decoder.layers
    dtype = decoder.embed_tokens(torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)).dtype
    rotary = decoder.rotary_emb
    final, memory, reasons = norm_of(decoder.norm, dtype), Zeros(), dict(unfused)
    checked(head, dtype)
    shapes: dict[int, AttentionShape] = {}
    for place, layer in enumerate(layers):
        if place not in reasons:
            try:
                shapes[place] = looked_at(layer, rotary, dtype, memory)
            except CannotFuse as error:
                reasons[place] = str(error)
    fused: list[FusedLayer | None] = [None] * len(layers)
    for place, shape in shapes.items():
        try:
            fused[place] = fuse(layers[place], shape, rotary, dtype)
        except CannotFuse as error:
            reasons[place] = str(error)
    if not any(fused):
        raise CannotFuse(f"layer 0: {reasons[0]}")
    made, blank = with_signals(fused, dtype)
    return FusedModel(
        weakref.ref(decoder), decoder.embed_tokens, made, reasons, final, one(head, dtype), blank,
        attention_facts.logit_cap(model), attention_facts.embedding_multiplier(model),
        attention_facts.logit_divisor(model),
    )  # fmt: skip


def unfit(layer: Any) -> str | None:
    """Why a layer's modules do not compute what a fused layer does; None where they do."""
    if not isinstance(layer, ResidualNormLayer):
        return "it is not a replaced Llama-like layer"
    if not isinstance(layer.mlp, GatedMLP):
        return "its MLP was not replaced"
    if not (unchanged(layer) and unchanged(layer.mlp)):
        return "a module that is fused into another was changed"
    return attention_facts.why_not(layer.self_attn)


def norm_of(norm: Any, dtype: torch.dtype) -> FusedNorm:
    """The FusedNorm of a replaced norm module. Raises CannotFuse."""
    if not isinstance(norm, FusedRMSNorm) or norm.weight.dtype != dtype:
        dtype_of_it = next((str(p.dtype) for p in norm.parameters()), "no dtype")
        raise CannotFuse(f"a norm is {type(norm).__name__} in {dtype_of_it}")
    return FusedNorm(norm.weight, norm.rms_eps, norm.plus_one)


def attention_of(attention: Any, rotary: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    """The AttentionShape of a layer. memory: counters shared by the model's layers. Raises CannotFuse."""
    config, size = attention.config, int(attention.head_dim)
    frequencies, rope_scaling = attention_facts.rope(rotary, attention_facts.layer_type(attention))
    if attention_facts.form_of_rotary(attention).interleaved or not attention_facts.applies_rotary(attention):
        # no rotation: the angle is 0
        frequencies, rope_scaling = torch.zeros(size // 2, device=frequencies.device), 1.0
    q_norm, k_norm = (None, None) if attention_facts.normed_over_all(attention) else q_k_norms(attention, dtype)
    both = {(norm.eps, norm.plus_one) for norm in (q_norm, k_norm) if norm is not None} or {(0.0, False)}
    if len(both) > 1:
        raise CannotFuse("the norms of q and k differ in their epsilon")
    eps, plus_one = both.pop()
    shape = AttentionShape(
        config.num_attention_heads, config.num_key_value_heads, size, float(attention.scaling), frequencies.float(),
        rope_scaling, attention_facts.window(attention),
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        eps, attention_facts.score_cap(attention), plus_one, memory,
    )  # fmt: skip
    if reason := decode_attention.why_not(shape, dtype, probe(frequencies.device)):
        raise CannotFuse(reason)
    return shape


def q_k_norms(attention: Any, dtype: torch.dtype) -> tuple[FusedNorm | None, FusedNorm | None]:
    """The norms of q and k; None where the attention has none. Raises CannotFuse."""
    q_norm, k_norm = (
        norm_of(getattr(attention, name), dtype) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return q_norm, k_norm


def prepared(attention: Any, rotary: Any, dtype: torch.dtype) -> QueryKey | None:
    """What is done to q and k before attention that its kernels do not do; None for nothing. Raises CannotFuse."""
    interleaved = attention_facts.form_of_rotary(attention).interleaved and attention_facts.applies_rotary(attention)
    over_all = attention_facts.normed_over_all(attention)
    if not interleaved and not over_all:
        return None
    frequencies, rope_scaling = attention_facts.rope(rotary, attention_facts.layer_type(attention))
    q_norm, k_norm = q_k_norms(attention, dtype) if over_all else (None, None)
    config = attention.config
    return QueryKey(
        config.num_attention_heads, config.num_key_value_heads, int(attention.head_dim),
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps, frequencies.float() if interleaved else None, rope_scaling,
    )  # fmt: skip


def looked_at(layer: Any, rotary: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    """The AttentionShape of a layer that can be fused; nothing moves. Raises CannotFuse for any other layer."""
    if reason := unfit(layer):
        raise CannotFuse(reason)
    attention, mlp = layer.self_attn, layer.mlp
    shape = attention_of(attention, rotary, dtype, memory)
    for module in (*parts_of(attention), attention.o_proj, *halves_of(mlp), mlp.down_proj):
        checked(module, dtype)
    for norm in norms_of(layer):
        if norm is not None:
            norm_of(norm, dtype)
    multiplier_of(layer)
    return shape


def norms_of(layer: ResidualNormLayer) -> tuple[Any, Any, Any, Any]:
    """The norms before and after attention, and before and after the MLP; None where the layer has none."""
    before, after, inner, last = map(layer.norm, ("attention_norm", "after_attention", "mlp_norm", "after_mlp"))
    return before, after, inner, last


def multiplier_of(layer: Any) -> float:
    """By what a layer multiplies its branches before it adds them. Raises CannotFuse where its form is not known."""
    form = form_of(layer)
    if form is None:
        raise CannotFuse("its form is not known")
    return 1.0 if form.multiplier is None else float(getattr(layer, form.multiplier))


def parts_of(attention: Any) -> tuple[Any, ...]:
    """The linear layers of an attention's input, in the order q, k, v."""
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    return tuple(getattr(attention, name) for name in names)


def halves_of(mlp: Any) -> tuple[Any, ...]:
    """The linear layers of an MLP's input, in the order gate, up."""
    return (mlp.gate_up_proj,) if mlp.fused_gate_up else (mlp.gate_proj, mlp.up_proj)


def checked(module: Any, dtype: torch.dtype) -> None:
    """Raise CannotFuse where a linear layer cannot run for activations of `dtype` on its device."""
    held = fused_linear(base_of(module), dtype)
    device = held.raw.device
    if device.type != "cpu" and dtype not in DTYPES:
        raise CannotFuse(f"its activations are {dtype}")
    if reason := held.why_not(dtype, probe(device)):
        raise CannotFuse(reason)
    active(module)


def one(module: Any, dtype: torch.dtype) -> FusedLinear | Adapted:
    """A linear layer with its adapters."""
    return with_adapters(fused_linear(base_of(module), dtype), (module,), dtype)


def fuse(layer: Any, shape: AttentionShape, rotary: Any, dtype: torch.dtype) -> FusedLayer:
    """The fused layer of one decoder layer; concatenates neighbouring weights."""
    norms: list[Any] = [None if norm is None else norm_of(norm, dtype) for norm in norms_of(layer)]
    before, after, inner, last = norms
    parts, halves = parts_of(layer.self_attn), halves_of(layer.mlp)
    qkv = with_adapters(concatenated_linear([base_of(part) for part in parts], dtype), parts, dtype)
    both = with_adapters(gated_linear([base_of(half) for half in halves], dtype, layer.mlp.activation), halves, dtype)
    fused = FusedLayer(
        qkv, before, shape, one(layer.self_attn.o_proj, dtype),
        both, inner, layer.mlp.activation, one(layer.mlp.down_proj, dtype), after, last,
        prepared(layer.self_attn, rotary, dtype), multiplier_of(layer),
    )  # fmt: skip
    if shape.inv_freq.is_cuda:  # freed parts are too small for the next layer's concatenated weight
        torch.cuda.empty_cache()
    return fused
