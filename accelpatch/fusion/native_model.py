"""Reads a patched Llama-like model's packs, norms and sizes off its replaced modules, for the native CPU step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion import attention_facts, layer_facts
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import decoder_of
from accelpatch.fusion.spread import OFFLOADED, is_offloaded, offloaded_inside
from accelpatch.kernels.cpu.decode_step import DecodeStep, LayerWeights, StepShape
from accelpatch.kernels.cpu.native_library import ACTIVATIONS
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.models.family import DecoderForm
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.norm import FusedRMSNorm, ResidualNormLayer
from accelpatch.modules.quantized_module import QuantizedModule, packed_modules
from accelpatch.modules.replacement import unchanged

NONE: Mapping[int, str] = {}
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
NORMS = {"after_attention": "after_attention_norm", "after_mlp": "after_mlp_norm"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(eq=False)
class NativeModel:
    """The part of a native step that does not depend on the cache.

    layers: None for one that must run as a module. unfused: place of such a layer -> why.
    """

    shape: StepShape
    layers: list[LayerWeights | None]
    unfused: Mapping[int, str]
    embedding: Pack
    head: Pack
    final_norm: Tensor

    @property
    def places(self) -> set[int]:
        """The places of the layers that have a native form."""
        return {place for place, layer in enumerate(self.layers) if layer is not None}

    def without(self, failed: Mapping[int, str]) -> NativeModel:
        """This model with more layers that run as modules: place -> why."""
        layers = [None if place in failed else layer for place, layer in enumerate(self.layers)]
        return replace(self, layers=layers, unfused={**self.unfused, **failed})

    def step(self, keys: Tensor, values: Tensor) -> DecodeStep:
        """A step over keys, values[layers, B, Hkv, length, D]."""
        return DecodeStep(self.shape, self.layers, self.embedding, self.head, self.final_norm, keys, values)


def native_model(model: nn.Module, unfused: Mapping[int, str] = NONE) -> NativeModel:
    """The model's weights for a native step.

    unfused: place -> reason, of layers that must run as modules; others that have no native form join them. Raises
    CannotFuse where no layer has one, or the embedding, last norm or head does not.
    """
    found = decoder_of(model)
    decoder, head = found.module, found.head
    if found.form != DecoderForm() or attention_facts.by_length(found.rotary):
        raise CannotFuse("the native step is for decoders of Llama's form with fixed frequencies")
    layers, reasons = decoder.layers, dict(unfused)
    for place, layer in enumerate(layers):
        if place not in reasons and (reason := _why_not(layer, model)):
            reasons[place] = reason
    gather_packs(model)
    first = next((layer for place, layer in enumerate(layers) if place not in reasons), None)
    if first is None:
        raise CannotFuse(f"layer 0: {reasons[0]}")
    ropes = rope_kinds(decoder.rotary_emb, layers)
    shape = step_shape(model, decoder, first, ropes)
    weights: list[LayerWeights | None] = [None] * len(layers)
    for place, layer in enumerate(layers):
        if place not in reasons:
            try:
                weights[place] = _checked_weights(layer, first, ropes, shape)
            except CannotFuse as error:
                reasons[place] = str(error)
    if not any(weights):
        raise CannotFuse(f"layer 0: {reasons[0]}")
    norm = vector(decoder.norm, shape.eps)
    return NativeModel(shape, weights, reasons, packed(decoder.embed_tokens), packed(head), norm)


def _why_not(layer: Any, model: Any) -> str | None:
    """Why a layer's modules do not compute what a native step does; None where they do."""
    mlp = layer_facts.mlp_of(layer)
    if offloaded_inside(layer):
        return OFFLOADED
    if not isinstance(layer, ResidualNormLayer) or not isinstance(mlp, GatedMLP) or mlp.fused_gate_up:
        return "it is not a replaced Llama-like layer"
    if not (unchanged(layer) and unchanged(mlp)):
        return "a module that is fused into another was changed"
    return (
        layer_facts.other_code(layer)
        or layer_facts.why_not(layer)
        or attention_facts.why_not(layer_facts.attention_of(layer))
        or attention_facts.native_why_not(layer, model)
    )


def _checked_weights(layer: Any, first: Any, ropes: list[str], shape: StepShape) -> LayerWeights:
    if _constants(layer) != _constants(first):
        raise CannotFuse("it has another scaling, softcap or activation than other layers")
    return layer_weights(layer, ropes.index(_type(layer)) if len(ropes) > 1 else 0, shape.eps)


def _constants(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.scaling, attention_facts.score_cap(layer.self_attn), layer.mlp.activation


def rope_kinds(rotary: nn.Module, layers: Sequence[Any]) -> list[str]:
    """The layer types whose rotary frequencies differ; "" where all layers share one."""
    return [""] if attention_facts.one_rope(rotary) else sorted({_type(layer) for layer in layers})


def _type(layer: Any) -> str:
    return attention_facts.layer_type(layer.self_attn)


def step_shape(model: nn.Module, decoder: Any, first: Any, ropes: list[str]) -> StepShape:
    """The sizes and constants of the step, from the configuration and the first layer that has a native form."""
    text: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    attention: Any = first.self_attn
    if len(ropes) > 2 or first.mlp.activation not in ACTIVATIONS:
        raise CannotFuse(f"activation {first.mlp.activation} with {len(ropes)} kinds of rotary frequencies")
    size, rotary = attention.head_dim, decoder.rotary_emb
    rope = tuple(attention_facts.rope(rotary, kind) for kind in ropes)
    if any(inverse.shape[0] * 2 != size for inverse, _ in rope):
        raise CannotFuse("its rotary embedding covers only a part of each head")
    scale = getattr(decoder.embed_tokens, "embed_scale", 1.0)
    return StepShape(
        text.hidden_size, text.num_attention_heads, text.num_key_value_heads, size, text.intermediate_size,
        text.vocab_size, replaced_norm(decoder.norm).rms_eps, float(attention.scaling), rope, first.mlp.activation,
        float(scale), attention_facts.score_cap(attention), attention_facts.logit_cap(model),
    )  # fmt: skip


def layer_weights(layer: Any, rope: int, eps: float) -> LayerWeights:
    """Packs and norms of one layer. eps: the epsilon that all norms must have."""
    attention = layer.self_attn
    linears = {name: packed(getattr(attention, child)) for name, child in ATTENTION.items()}
    linears |= {name: packed(getattr(layer.mlp, child)) for name, child in MLP.items()}
    names = {NORMS.get(place, place): layer.norm(place) for place in layer.norms}
    if hasattr(attention, "q_norm"):
        names["q_norm"], names["k_norm"] = attention.q_norm, attention.k_norm
    norms = {name: vector(norm, eps) for name, norm in names.items()}
    return LayerWeights(linears, norms, attention_facts.window(attention), rope)


def replaced_norm(norm: nn.Module) -> FusedRMSNorm:
    """The module itself. Raises CannotFuse for a norm that was not replaced, or is not float32."""
    if is_offloaded(norm):
        raise CannotFuse(f"{type(norm).__name__}: {OFFLOADED}")
    if not isinstance(norm, FusedRMSNorm) or norm.weight.dtype != torch.float32:
        dtype = next((str(p.dtype) for p in norm.parameters()), "no dtype")
        raise CannotFuse(f"a norm is {type(norm).__name__} in {dtype}, not a replaced one in float32")
    return norm


def vector(module: nn.Module, eps: float) -> Tensor:
    """The float32 vector that a replaced norm multiplies by."""
    norm = replaced_norm(module)
    if norm.rms_eps != eps:
        raise CannotFuse(f"its norms have different epsilons, {norm.rms_eps} and {eps}")
    return norm.weight.detach() + 1 if norm.plus_one else norm.weight.detach()


def packed(module: Any) -> Pack:
    """The weight of a linear layer or embedding as a Pack with its bias; a float32 weight as it is."""
    if is_offloaded(module):
        raise CannotFuse(f"{type(module).__name__}: {OFFLOADED}")
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise CannotFuse(f"{type(module).__name__} is not a linear layer or embedding of accelpatch")
    bias: Any = getattr(module, "bias", None)
    if isinstance(module, QuantizedModule):
        if module.like.dtype != torch.float32 or module.held.pack is None:
            raise CannotFuse(f"{type(module).__name__} is in {module.like.dtype} or not packed for the CPU")
        return replace(module.held.pack, bias=None if bias is None else bias.detach().float())
    plain = type(module).forward in (nn.Linear.forward, nn.Embedding.forward) or hasattr(module, "embed_scale")
    if not plain or module.weight.dtype != torch.float32 or module.weight.is_meta:
        raise CannotFuse(f"{type(module).__name__} in {module.weight.dtype} is no plain float32 weight")
    return Pack.dense(module.weight, bias)


def gather_packs(model: nn.Module) -> None:
    """Move all packs into one block of memory in reading order, so that a step reads one stream."""
    modules = [module for module in packed_modules(model) if not is_offloaded(module)]
    packs = [module.pack for module in modules if module.pack is not None]
    for module, pack in zip(modules, Pack.in_one_block(packs), strict=True):
        module.pack = pack
