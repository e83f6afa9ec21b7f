"""Reads the norms, heads and rotary embedding of a fused layer off its replaced modules."""

from __future__ import annotations

from typing import Any

import torch

from accelpatch.device import probe
from accelpatch.fusion.adapters import base_of
from accelpatch.fusion.attention_description import AttentionDescription
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_weights import fused_linear
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.rotary import by_length, rope
from accelpatch.fusion.spread import device_of
from accelpatch.kernels.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.query_key_form import QueryKey
from accelpatch.models.family import norm_of as kind_of
from accelpatch.modules.norm import FusedRMSNorm


def norm_of(norm: Any, dtype: torch.dtype) -> FusedNorm:
    """The FusedNorm of a replaced norm module, or of a LayerNorm. Raises CannotFuse."""
    kind = kind_of(norm)
    if kind is not None and kind.layer:
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if weight is None or weight.dim() != 1 or any(one.dtype != dtype for one in (weight, bias) if one is not None):
            raise CannotFuse(f"a norm is {type(norm).__name__} without a vector of weights in {dtype}")
        return FusedNorm(weight, float(getattr(norm, kind.eps)), layer=True, bias=bias)
    if not isinstance(norm, FusedRMSNorm) or norm.weight.dtype != dtype:
        dtype_of_it = next((str(p.dtype) for p in norm.parameters()), "no dtype")
        raise CannotFuse(f"a norm is {type(norm).__name__} in {dtype_of_it}")
    return FusedNorm(norm.weight, norm.rms_eps, norm.plus_one)


def heads_of(layer: LayerDescription, dtype: torch.dtype) -> tuple[int, int, int]:
    """(query heads, heads of the cache, head size) by the weights of a layer's q, k and v. Raises CannotFuse."""
    return attention_of(layer).heads([fused_linear(base_of(part), dtype).n for part in layer.qkv])


def attention_of(layer: LayerDescription) -> AttentionDescription:
    """The attention of a layer. Raises CannotFuse where it has none that is known."""
    if layer.attention is None:
        raise CannotFuse("its form is not known")
    return layer.attention


def attention_shape(layer: LayerDescription, rotary: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    """The AttentionShape of a layer. memory: counters shared by the model's layers. Raises CannotFuse."""
    attention, (heads, kv_heads, size) = attention_of(layer), heads_of(layer, dtype)
    device = device_of(attention.module)
    if attention.interleaved or not attention.rotates:  # no rotation: the angle is 0
        frequencies, rope_scaling = torch.zeros(size // 2, device=device), 1.0
    else:
        frequencies, rope_scaling = rope(rotary, attention.layer_type)
        if by_length(rotary) and frequencies.dtype != torch.float32:
            raise CannotFuse(f"its frequencies change with the length, and are {frequencies.dtype}")
        frequencies = frequencies.to(device)
    q_norm, k_norm = (None, None) if attention.normed_over_all else q_k_norms(attention, dtype)
    both = {(norm.eps, norm.plus_one) for norm in (q_norm, k_norm) if norm is not None} or {(0.0, False)}
    if len(both) > 1:
        raise CannotFuse("the norms of q and k differ in their epsilon")
    eps, plus_one = both.pop()
    sinks = attention.sinks
    if sinks is not None and sinks.shape != (heads,):
        raise CannotFuse(f"its sinks are {list(sinks.shape)} for {heads} heads")
    shape = AttentionShape(
        heads, kv_heads, size, attention.scaling, frequencies.float(), rope_scaling, attention.window,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        eps, attention.score_cap, plus_one, None if sinks is None else sinks.detach().float().to(device), memory,
    )  # fmt: skip
    if reason := decode_attention.why_not(shape, dtype, probe(frequencies.device)):
        raise CannotFuse(reason)
    return shape


def q_k_norms(attention: AttentionDescription, dtype: torch.dtype) -> tuple[FusedNorm | None, FusedNorm | None]:
    """The norms of q and k; None where the attention has none. Raises CannotFuse."""
    if not attention.normed:
        return None, None
    return norm_of(attention.module.q_norm, dtype), norm_of(attention.module.k_norm, dtype)


def prepared(layer: LayerDescription, rotary: Any, dtype: torch.dtype) -> QueryKey | None:
    """What is done to q and k before attention that its kernels do not do; None for nothing. Raises CannotFuse."""
    attention = attention_of(layer)
    if not attention.interleaved and not attention.normed_over_all:
        return None
    frequencies, rope_scaling = rope(rotary, attention.layer_type)
    frequencies = frequencies.to(device_of(attention.module))
    q_norm, k_norm = q_k_norms(attention, dtype) if attention.normed_over_all else (None, None)
    return QueryKey(
        *heads_of(layer, dtype), None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight, 0.0 if q_norm is None else q_norm.eps,
        frequencies.float() if attention.interleaved else None, rope_scaling,
    )  # fmt: skip
