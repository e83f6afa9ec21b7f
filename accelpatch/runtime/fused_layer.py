"""The decode step of a patched Llama-like model in five launches a layer, read off its replaced modules.

A layer is: norm and q, k, v; rotary embedding, cache write and attention; o and the residual; norm, gate, up and the
activation; down and the residual. The last norm goes into the head's product. What is read must be what the modules
would compute: anything else is a reason (`Unfit`), and the captured step then runs the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.device import probe
from accelpatch.kernels import decode_attention
from accelpatch.kernels.decode_attention import AttentionShape, decode_attention_
from accelpatch.kernels.fused_product import Norm, Product
from accelpatch.kernels.hip.binding import MOST
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.norm import FusedRMSNorm, ResidualNormLayer
from accelpatch.modules.rotary import FusedRotaryEmbedding
from accelpatch.runtime.fused_weights import Unfit, one_product, product
from accelpatch.runtime.native_weights import window

FUSED = "fused layers"
# transformers' attention classes whose arithmetic is that of decode_attention
ATTENTION = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """One decoder layer."""

    qkv: Product
    attention_norm: Norm
    attention: AttentionShape
    o: Product
    gate_up: Product
    mlp_norm: Norm
    activation: str
    down: Product

    def __call__(self, x: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """x[B T, K] -> [B T, K] at positions[B, T]; keys and values go into `cache`, a layer of captured_cache.py."""
        qkv = self.qkv(x, self.attention_norm)
        seen = decode_attention_(qkv, positions, slot, mask, cache.keys, cache.values, self.attention)
        x = self.o(seen, residual=x)
        return self.down(self.gate_up(x, self.mlp_norm, gate=self.activation), residual=x)


@dataclass(frozen=True, eq=False)
class FusedModel:
    """All layers, with what comes before and after them."""

    embedding: nn.Module
    layers: tuple[FusedLayer, ...]
    norm: Norm
    head: Product
    most: int = MOST  # rows of a step

    def __call__(self, tokens: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits [B T, V] after tokens[B] or [B, T], cached from `slot` on; positions[B, T], mask as the cache's."""
        x = self.embedding(tokens.reshape(-1))
        for layer, held in zip(self.layers, cache.layers, strict=True):
            x = layer(x, positions, slot, mask, held)
        return self.head(x, self.norm)


def read(model: Any) -> FusedModel:
    """The fused layers of a patched model, whose weights it lays together. Raises Unfit with the reason for none."""
    decoder, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    layers = getattr(decoder, "layers", None)
    if decoder is None or head is None or not layers:
        raise Unfit("it has no decoder of the Llama form")
    embedding: Any = decoder.embed_tokens
    dtype = embedding(torch.zeros(1, dtype=torch.int64, device=head.weight.device)).dtype
    for place, layer in enumerate(layers):
        if reason := unfit(layer):
            raise Unfit(f"layer {place}: {reason}")
    rotary = decoder.rotary_emb
    if not isinstance(rotary, FusedRotaryEmbedding) or not hasattr(rotary, "inv_freq"):
        raise Unfit("its rotary embedding was not replaced")
    if model.config._attn_implementation not in ("eager", "sdpa"):
        raise Unfit(f"the attention implementation is {model.config._attn_implementation}")
    final = norm_of(decoder.norm, dtype)
    check(product(head, dtype), dtype)
    # every layer is looked at before the first is laid together
    shapes = [attention_of(layer.self_attn, rotary, dtype) for layer in layers]
    for layer in layers:
        looked_at(layer, dtype)
    fused = tuple(fuse(layer, shape, dtype) for layer, shape in zip(layers, shapes, strict=True))
    return FusedModel(embedding, fused, final, product(head, dtype))


def unfit(layer: Any) -> str | None:
    """Why a layer's modules are not those of the step; None where they are."""
    if not isinstance(layer, ResidualNormLayer) or layer.sandwich:
        return "it is no replaced layer of the Llama form"
    if not isinstance(layer.mlp, GatedMLP) or layer.mlp.fused_rows:
        return "its MLP is no replaced one with gate_proj and up_proj"
    own = type(layer.self_attn)
    if own.__name__ not in ATTENTION or not own.__module__.startswith("transformers."):
        return f"its attention is {own.__name__}"
    return None


def norm_of(norm: Any, dtype: torch.dtype) -> Norm:
    """What a replaced norm computes."""
    if not isinstance(norm, FusedRMSNorm) or norm.plus_one or norm.weight.dtype != dtype:
        raise Unfit(f"a norm is {type(norm).__name__} in {norm.weight.dtype}")
    return Norm(norm.weight, norm.rms_eps)


def attention_of(attention: Any, rotary: Any, dtype: torch.dtype) -> AttentionShape:
    """Sizes and constants of a layer's attention."""
    config, size = attention.config, int(attention.head_dim)
    if rotary.inv_freq.shape[0] * 2 != size:
        raise Unfit("its rotary embedding turns a part of each head only")
    q_norm, k_norm = (
        norm_of(getattr(attention, name), dtype) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    if q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps:
        raise Unfit("the norms of q and k differ in their epsilon")
    shape = AttentionShape(
        config.num_attention_heads, config.num_key_value_heads, size, float(attention.scaling), rotary.inv_freq,
        float(rotary.attention_scaling), window(attention),
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
    )  # fmt: skip
    if reason := decode_attention.why_not(shape, dtype, probe(rotary.inv_freq.device)):
        raise Unfit(reason)
    return shape


def looked_at(layer: Any, dtype: torch.dtype) -> None:
    """Raises Unfit where a product of a layer cannot be run by itself."""
    attention, mlp = layer.self_attn, layer.mlp
    for module in (*parts_of(attention), attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        check(product(module, dtype), dtype)


def parts_of(attention: Any) -> tuple[Any, Any, Any]:
    """The three products of an attention's input."""
    return attention.q_proj, attention.k_proj, attention.v_proj


def check(one: Product, dtype: torch.dtype) -> None:
    """Raises Unfit where a product cannot run for activations of `dtype` on the device that it lies on."""
    device = (one.w if isinstance(one.w, Tensor) else one.w.w).device
    if device.type != "cpu" and dtype not in DTYPES:
        raise Unfit(f"its activations are {dtype}")
    if reason := one.why_not(dtype, probe(device)):
        raise Unfit(reason)


def fuse(layer: Any, shape: AttentionShape, dtype: torch.dtype) -> FusedLayer:
    """One layer, its neighbouring weights laid together."""
    mlp = layer.mlp
    fused = FusedLayer(
        one_product(parts_of(layer.self_attn), dtype), norm_of(layer.input_layernorm, dtype), shape,
        product(layer.self_attn.o_proj, dtype), one_product((mlp.gate_proj, mlp.up_proj), dtype),
        norm_of(layer.post_attention_layernorm, dtype), mlp.activation, product(mlp.down_proj, dtype),
    )  # fmt: skip
    if shape.inv_freq.is_cuda:  # what the parts lay in is no room for the next layer's whole
        torch.cuda.empty_cache()
    return fused
