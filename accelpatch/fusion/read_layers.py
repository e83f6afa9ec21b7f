"""Reads the fused layers of a patched model off its replaced modules."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from accelpatch.device import probe
from accelpatch.fusion.across import across_of
from accelpatch.fusion.adapters import active, base_of, with_adapters
from accelpatch.fusion.attention_description import both_ways
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import Decoder, decoder_of
from accelpatch.fusion.fused_layer import FusedLayer
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.fused_weights import concatenated_linear, fused_linear, gated_linear
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.read_attention import attention_shape, norm_of, prepared
from accelpatch.fusion.rotary import axes_of, by_length
from accelpatch.fusion.signals import with_signals
from accelpatch.fusion.sparse_layer import FusedSparseLayer, sparse_mlp
from accelpatch.fusion.spread import (
    ByModule,
    Sentinels,
    Spread,
    computes_on,
    is_offloaded,
    offloaded_inside,
    spread_of,
)  # fmt: skip
from accelpatch.kernels.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear

DTYPES = (torch.bfloat16, torch.float16)
NONE: Mapping[int, str] = {}


def fused_model(model: Any, unfused: Mapping[int, str] = NONE) -> FusedModel:
    """The fused layers of a patched model; concatenates their weights.

    unfused: place -> reason, of layers that must run as modules; others that cannot be fused join them, but for those
    that are one replacement with all that is in it, whose own module is what a fused layer would be. Raises CannotFuse
    where there is neither, or the last norm or head cannot be fused.
    """
    decoder = decoder_of(model)
    layers, head, rotary = decoder.layers, decoder.head, decoder.rotary
    dtype = decoder.embedding(torch.zeros(1, dtype=torch.int64, device=computes_on(decoder.embedding))).dtype
    spread, memory, reasons = spread_of(list(layers), decoder.embedding, head), Zeros(), dict(unfused)
    final, last = ends_of(decoder, spread, dtype)
    if spread is not None and by_length(rotary):
        raise CannotFuse("layers on several devices, and rotary frequencies that change with the length")
    described = [LayerDescription(layer) for layer in layers]
    shapes: dict[int, AttentionShape] = {}
    whole = frozenset(place for place, layer in enumerate(layers) if getattr(layer, "is_whole", False))
    for place, layer in enumerate(described):
        if place not in reasons and place not in whole:
            try:
                shapes[place] = looked_at(layer, rotary, dtype, memory)
            except CannotFuse as error:
                reasons[place] = str(error)
    fused: list[FusedLayer | None] = [None] * len(layers)
    for place, shape in shapes.items():
        try:
            fused[place] = fuse(described[place], shape, rotary, dtype)
        except CannotFuse as error:
            reasons[place] = str(error)
    if not any(fused) and not whole:
        raise CannotFuse(f"layer 0: {reasons[0]}")
    made, blank = signalling(fused, dtype, computes_on(decoder.norm), spread)
    return FusedModel(
        weakref.ref(decoder.module), dtype, decoder.embedding, made, reasons, final, last, blank,
        decoder.logit_cap, decoder.embedding_multiplier, decoder.logit_divisor, positions=decoder.positions,
        by_length=by_length(rotary), both_ways=both_ways(decoder.module.config), axes=axes_of(rotary), whole=whole,
        spread=spread,
        across=None if isinstance(last, ByModule) else across_of(head),
    )  # fmt: skip


def ends_of(decoder: Decoder, spread: Spread | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """The last norm, on the head's device, and the head; where offloaded by their modules. Raises CannotFuse."""
    norm, head = decoder.norm, decoder.head
    final: Any = ByModule(norm) if is_offloaded(norm) else norm_of(norm, dtype)
    if spread is not None and not isinstance(final, ByModule):
        bias = None if final.bias is None else final.bias.to(spread.last)
        final = replace(final, weight=final.weight.to(spread.last), bias=bias)
    if offloaded_inside(head):
        return final, ByModule(head)
    checked(head, dtype)
    return final, one(head, dtype)


def signalling(
    layers: list[FusedLayer | None], dtype: torch.dtype, device: torch.device, spread: Spread | None
) -> tuple[tuple[Any, ...], Any]:
    """`with_signals`, for the layers of each device apart."""
    if spread is None:
        return with_signals(layers, dtype, device)
    made, blank = list[Any](layers), {}
    for here in dict.fromkeys(spread.layers):
        places = [place for place, one in enumerate(spread.layers) if one == here]
        found, blank[here] = with_signals([layers[place] for place in places], dtype, here)
        for place, layer in zip(places, found, strict=True):
            made[place] = layer
    return tuple(made), Sentinels(blank)


def looked_at(layer: LayerDescription, rotary: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    """The AttentionShape of a layer that can be fused; nothing moves. Raises CannotFuse for any other layer."""
    if reason := layer.changed():
        raise CannotFuse(reason)
    for module in linears_of(layer):
        checked(module, dtype)
    shape = attention_shape(layer, rotary, dtype, memory)
    for norm in layer.norms.values():
        norm_of(norm, dtype)
    return shape


def linears_of(layer: LayerDescription) -> tuple[Any, ...]:
    """All linear layers of attention and MLP. Raises CannotFuse where one is missing."""
    found = [layer.qkv, layer.output, *(() if layer.sparse is not None else (layer.inner, layer.last))]
    if not all(found):
        raise CannotFuse("a linear layer of its attention or MLP is missing")
    return tuple(module for modules in found for module in modules)


def checked(module: Any, dtype: torch.dtype) -> None:
    """Raise CannotFuse where a linear layer cannot run for activations of `dtype` on its device."""
    linear = fused_linear(base_of(module), dtype)
    device = linear.weight.w.device
    if device.type != "cpu" and dtype not in DTYPES:
        raise CannotFuse(f"its activations are {dtype}")
    if reason := linear.why_not(dtype, probe(device)):
        raise CannotFuse(reason)
    active(module)


def one(module: Any, dtype: torch.dtype) -> FusedLinear | AdaptedLinear:
    """A linear layer with its adapters."""
    return with_adapters(fused_linear(base_of(module), dtype), (module,), dtype)


def fuse(layer: LayerDescription, shape: AttentionShape, rotary: Any, dtype: torch.dtype) -> FusedLayer:
    """The fused layer of one decoder layer; concatenates neighbouring weights."""
    norms, form = {place: norm_of(norm, dtype) for place, norm in layer.norms.items()}, layer.form
    assert form is not None
    before, after, inner = (norms.get(place) for place in ("attention_norm", "after_attention", "mlp_norm"))
    if inner is not None and form.mlp_norm == form.attention_norm:
        inner = before
    qkv = with_adapters(concatenated_linear([base_of(part) for part in layer.qkv], dtype), layer.qkv, dtype)
    (o,), query_key = layer.output, prepared(layer, rotary, dtype)
    fused: FusedLayer
    if layer.sparse is not None:
        absent: Any = None  # gate, up and down are the experts'
        fused = FusedSparseLayer(
            qkv, before, shape, one(o, dtype), absent, inner, None, absent, after, None, query_key,
            by_head=layer.family.by_head, across=across_of(o), sparse=sparse_mlp(layer, dtype),
        )  # fmt: skip
    else:
        (down,) = layer.last
        plain, activation, inputs = layer.plain, layer.activation, [base_of(half) for half in layer.inner]
        both = with_adapters(
            concatenated_linear(inputs, dtype) if plain else gated_linear(inputs, dtype, activation), layer.inner, dtype
        )
        fused = FusedLayer(
            qkv, before, shape, one(o, dtype), replace(both, activation=activation) if plain else both, inner,
            None if plain else activation, one(down, dtype), after, norms.get("after_mlp"), query_key,
            layer.multiplier, bool(form.parallel), layer.family.by_head, across_of(o),
        )  # fmt: skip
    if shape.inv_freq.is_cuda:  # freed parts are too small for the next layer's concatenated weight
        torch.cuda.empty_cache()
    return fused
