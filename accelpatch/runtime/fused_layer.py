"""The decode step of a patched Llama-like model in five launches a layer, read off its replaced modules.

A layer is: norm and q, k, v; rotary embedding, cache write and attention; o and the residual; norm, gate, up and the
activation; down and the residual. The last norm goes into the head's product. What is read must be what the modules
would compute: anything else is a reason (`Unfit`), and the captured step then runs the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.device import probe
from accelpatch.kernels import decode_attention
from accelpatch.kernels.decode_attention import AttentionShape, decode_attention_
from accelpatch.kernels.fused_product import Norm, Product, gated, normed
from accelpatch.kernels.hip.binding import FEW, MOST
from accelpatch.kernels.prompt_attention import prompt_attention_, visible
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

    def __call__(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x[B, K] -> [B, K] for few rows; attend: the row of q, k and v -> [B, Hq D]."""
        x = self.o(attend(self.qkv(x, self.attention_norm)), residual=x)
        return self.down(self.gate_up(x, self.mlp_norm, gate=self.activation), residual=x)

    def rows(self, x: Tensor, added: Tensor | None, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The same for many rows x + added[M, K]; what is still to be added comes apart, for the norm that follows."""
        normal, x = normed(self.attention_norm, x, added)
        normal, x = normed(self.mlp_norm, x, self.o.rows(attend(self.qkv.rows(normal))))
        return x, self.down.rows(gated(self.gate_up.rows(normal), self.activation))


@dataclass(frozen=True, eq=False)
class FusedModel:
    """All layers, with what comes before and after them."""

    embedding: nn.Module
    layers: tuple[FusedLayer, ...]
    norm: Norm
    head: Product
    most: int = MOST  # rows of a step

    def __call__(self, tokens: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits [B, V] after tokens[B], which are cached at `slot`; mask as the cache's."""
        x, added = self.embedding(tokens), None
        for layer, held in zip(self.layers, cache.layers, strict=True):

            def attend(qkv: Tensor, layer: FusedLayer = layer, held: Any = held) -> Tensor:
                return decode_attention_(qkv, positions, slot, mask, held.keys, held.values, layer.attention)

            if len(tokens) <= FEW:
                x = layer(x, attend)
            else:
                x, added = layer.rows(x, added, attend)
        return self._logits(x, added)

    def prompt(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, last: Tensor | None = None
    ) -> Tensor:
        """Logits [B, V] after ids[B, L], which fill the first slots of an empty cache.

        mask[B, L]: None shows all. last[1]: the place of the token whose logits are wanted; None is the last one.
        """
        x, added = self.embedding(ids.reshape(-1)), None
        seen: dict[int, Tensor | None] = {}
        for layer, held in zip(self.layers, cache.layers, strict=True):
            window = layer.attention.window
            if window not in seen:
                seen[window] = visible(mask, ids.shape[1], window, ids.device)

            def attend(qkv: Tensor, layer: FusedLayer = layer, held: Any = held, window: int = window) -> Tensor:
                return prompt_attention_(qkv, positions, seen[window], held.keys, held.values, layer.attention)

            x, added = layer.rows(x, added, attend)
        rows = [one.view(*ids.shape, -1) for one in (x, added) if one is not None]
        return self._logits(
            *(one[:, -1].contiguous() if last is None else one.index_select(1, last)[:, 0] for one in rows)
        )

    def _logits(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if added is None:
            return self.head(x, self.norm)
        return self.head.rows(normed(self.norm, x, added)[0])


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
