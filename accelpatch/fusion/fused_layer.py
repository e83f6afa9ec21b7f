"""The decode step of a patched Llama-like model in five kernel launches per layer, read off its replaced modules.

The launches: norm, q, k and v; rotary embedding, cache write and attention; o and residual; norm, gate, up and
activation; down and residual. Norms after attention and MLP, with the residual, are one more launch each, and so is a
gate other than silu. The last norm is part of the head's launch. Raises `CannotFuse` where modules compute more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.device import probe
from accelpatch.fusion import attention_facts
from accelpatch.fusion.adapters import Adapted, active, base_of, with_adapters
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_weights import concatenated_linear, fused_linear, gated_linear
from accelpatch.fusion.signals import SentinelBuffers, with_signals, without_signals
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS, MAX_ROWS, Signal
from accelpatch.kernels.ops import decode_attention
from accelpatch.kernels.ops.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.ops.decode_attention import decode_attention_
from accelpatch.kernels.ops.fused_linear import FusedLinear, FusedNorm, normed
from accelpatch.kernels.ops.prompt_attention import prompt_attention_, visible
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.norm import FusedRMSNorm, ResidualNormLayer
from accelpatch.modules.replacement import unchanged
from accelpatch.modules.rotary import FusedRotaryEmbedding

FUSED = "fused layers"
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """One decoder layer. after_attention, after_mlp: norms applied before the residual is added (Gemma), or None."""

    qkv: FusedLinear | Adapted
    attention_norm: FusedNorm
    attention: AttentionShape
    o: FusedLinear | Adapted
    gate_up: FusedLinear | Adapted
    mlp_norm: FusedNorm
    activation: str
    down: FusedLinear | Adapted
    after_attention: FusedNorm | None = None
    after_mlp: FusedNorm | None = None

    def __call__(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x[M, K] -> [M, K] for few rows. attend: qkv rows [M, (Hq + 2 Hkv) D] -> [M, Hq D]."""
        x = added(self.o, attend(self.qkv(x, self.attention_norm)), self.after_attention, x)
        return added(self.down, self.gate_up(x, self.mlp_norm, gate=self.activation), self.after_mlp, x)

    @property
    def attention_signal(self) -> Signal | None:
        """The producer-consumer flag that attention waits for, or None."""
        return self.qkv.producer if isinstance(self.qkv, FusedLinear) else None

    @functools.cached_property
    def without_signals(self) -> FusedLayer:
        """This layer without flags between its kernels, for calls that may run beside other steps."""
        parts: Any = {name: without_signals(getattr(self, name)) for name in ("qkv", "gate_up", "down")}
        return replace(self, **parts)

    def large_m(
        self, x: Tensor, pending: Tensor | None, attend: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """As __call__ for many rows x + pending[M, K]; returns (x, rest), the rest to be added by the next norm."""
        normal, x = normed(self.attention_norm, x, pending)
        x, pending = beside(self.after_attention, self.o.large_m(attend(self.qkv.large_m(normal))), x)
        normal, x = normed(self.mlp_norm, x, pending)
        return beside(self.after_mlp, self.down.large_m(self.gate_up.large_m(normal, self.activation)), x)


def added(last: FusedLinear | Adapted, x: Tensor, norm: FusedNorm | None, residual: Tensor) -> Tensor:
    """residual + last(x), or residual + norm(last(x))."""
    return last(x, residual=residual) if norm is None else norm.added(last(x), residual)


def beside(norm: FusedNorm | None, y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """(residual, y still to be added); with a norm, (residual + norm(y), None)."""
    return (residual, y) if norm is None else (norm.added(y, residual), None)


@dataclass(frozen=True, eq=False)
class FusedModel:
    """All layers, the embedding, the last norm and the head. softcap: of the logits, 0 for none."""

    embedding: nn.Module
    layers: tuple[FusedLayer, ...]
    norm: FusedNorm
    head: FusedLinear | Adapted
    sentinels: SentinelBuffers
    softcap: float = 0.0
    most: int = MAX_ROWS  # most rows of a step

    def __call__(self, tokens: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits [B T, V] after tokens[B] or [B, T], cached from `slot` on; positions[B, T]; mask: the cache's."""
        self.sentinels.reset(tokens.numel())
        x, pending = self.embedding(tokens.reshape(-1)), None
        for layer, held in zip(self.layers, cache.layers, strict=True):
            if positions.shape[1] > 1:
                layer = replace(layer, qkv=without_signals(layer.qkv))  # attention waits for the whole qkv

            def attend(qkv: Tensor, layer: FusedLayer = layer, held: Any = held) -> Tensor:
                rest = layer.attention, layer.o.raw, layer.attention_signal
                return decode_attention_(qkv, positions, slot, mask, held.keys, held.values, *rest)

            if x.shape[0] <= MAX_GEMV_ROWS:
                x = layer(x, attend)
            else:
                x, pending = layer.large_m(x, pending, attend)
        return self._logits(x, pending)

    def forget(self) -> None:
        """Reset the flags that an interrupted step left set."""
        for layer in self.layers:
            for one in (layer.qkv, layer.gate_up):
                if isinstance(one, FusedLinear) and one.producer is not None:
                    one.producer.number.zero_()

    @property
    def no_prompts(self) -> str | None:
        """Why `prompt` would not compute what the modules do; None where it does."""
        shapes = [layer.attention for layer in self.layers]
        if any(one.softcap or one.plus_one or 2 * len(one.inv_freq) != one.size for one in shapes):
            return "attention with capped scores, partial rotary embedding, or norms of Gemma's kind"
        return None

    def prompt(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, last: Tensor | None = None
    ) -> Tensor:
        """Logits [B, V] after ids[B, L], which fill the first slots of an empty cache.

        mask[B, L]: None for no padding. last[1]: index of the token whose logits are wanted; None: the last one.
        """
        x, pending = self.embedding(ids.reshape(-1)), None
        seen: dict[int, Tensor | None] = {}
        for layer, held in zip(self.layers, cache.layers, strict=True):
            window = layer.attention.window
            if window not in seen:
                seen[window] = visible(mask, ids.shape[1], window, ids.device)

            def attend(qkv: Tensor, layer: FusedLayer = layer, held: Any = held, window: int = window) -> Tensor:
                return prompt_attention_(qkv, positions, seen[window], held.keys, held.values, layer.attention)

            x, pending = layer.large_m(x, pending, attend)
        rows = [one.view(*ids.shape, -1) for one in (x, pending) if one is not None]
        return self._logits(
            *(one[:, -1].contiguous() if last is None else one.index_select(1, last)[:, 0] for one in rows)
        )

    def _logits(self, x: Tensor, pending: Tensor | None = None) -> Tensor:
        if pending is None and x.shape[0] <= MAX_GEMV_ROWS:
            return self._capped(self.head(x, self.norm))
        return self.logits_of(normed(self.norm, x, pending)[0])

    def logits_of(self, normal: Tensor) -> Tensor:
        """Logits [M, V] of normalised hidden states [M, K]."""
        return self._capped(self.head.large_m(normal))

    def _capped(self, logits: Tensor) -> Tensor:
        return (logits / self.softcap).tanh() * self.softcap if self.softcap else logits


def fused_model(model: Any) -> FusedModel:
    """The fused layers of a patched model; concatenates their weights. Raises CannotFuse before any weight moves."""
    decoder, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    layers = getattr(decoder, "layers", None)
    if decoder is None or head is None or not layers:
        raise CannotFuse("it has no Llama-like decoder")
    if reason := attention_facts.model_why_not(model, decoder):
        raise CannotFuse(reason)
    dtype = decoder.embed_tokens(torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)).dtype
    for place, layer in enumerate(layers):
        if reason := unfit(layer):
            raise CannotFuse(f"layer {place}: {reason}")
    rotary = decoder.rotary_emb
    if not isinstance(rotary, FusedRotaryEmbedding):
        raise CannotFuse("its rotary embedding was not replaced")
    final, memory = norm_of(decoder.norm, dtype), Zeros()
    checked(head, dtype)
    shapes = [attention_of(layer.self_attn, rotary, dtype, memory) for layer in layers]
    for layer in layers:
        looked_at(layer, dtype)
    fused, blank = with_signals([fuse(layer, shape, dtype) for layer, shape in zip(layers, shapes, strict=True)], dtype)
    return FusedModel(decoder.embed_tokens, fused, final, one(head, dtype), blank, attention_facts.logit_cap(model))


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
    """The Norm of a replaced norm module. Raises CannotFuse."""
    if not isinstance(norm, FusedRMSNorm) or norm.weight.dtype != dtype:
        dtype_of_it = next((str(p.dtype) for p in norm.parameters()), "no dtype")
        raise CannotFuse(f"a norm is {type(norm).__name__} in {dtype_of_it}")
    return FusedNorm(norm.weight, norm.rms_eps, norm.plus_one)


def attention_of(attention: Any, rotary: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    """The AttentionShape of a layer. memory: counters shared by the model's layers. Raises CannotFuse."""
    config, size = attention.config, int(attention.head_dim)
    frequencies, rope_scaling = attention_facts.rope(rotary, attention_facts.layer_type(attention))
    q_norm, k_norm = (
        norm_of(getattr(attention, name), dtype) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
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


def looked_at(layer: Any, dtype: torch.dtype) -> None:
    """Raise CannotFuse where a linear layer or norm of the layer cannot run in a fused layer."""
    attention, mlp = layer.self_attn, layer.mlp
    for module in (*parts_of(attention), attention.o_proj, *halves_of(mlp), mlp.down_proj):
        checked(module, dtype)
    for norm in norms_of(layer):
        if norm is not None:
            norm_of(norm, dtype)


def norms_of(layer: ResidualNormLayer) -> tuple[Any, Any, Any, Any]:
    """The norms before and after attention, and before and after the MLP; None where the layer has none."""
    before, after, inner, last = map(layer.norm, ("attention_norm", "after_attention", "mlp_norm", "after_mlp"))
    return before, after, inner, last


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


def fuse(layer: Any, shape: AttentionShape, dtype: torch.dtype) -> FusedLayer:
    """The fused layer of one decoder layer; concatenates neighbouring weights."""
    norms: list[Any] = [None if norm is None else norm_of(norm, dtype) for norm in norms_of(layer)]
    before, after, inner, last = norms
    parts, halves = parts_of(layer.self_attn), halves_of(layer.mlp)
    qkv = with_adapters(concatenated_linear([base_of(part) for part in parts], dtype), parts, dtype)
    both = with_adapters(gated_linear([base_of(half) for half in halves], dtype, layer.mlp.activation), halves, dtype)
    fused = FusedLayer(
        qkv, before, shape, one(layer.self_attn.o_proj, dtype),
        both, inner, layer.mlp.activation, one(layer.mlp.down_proj, dtype), after, last,
    )  # fmt: skip
    if shape.inv_freq.is_cuda:  # freed parts are too small for the next layer's concatenated weight
        torch.cuda.empty_cache()
    return fused
