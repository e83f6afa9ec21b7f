"""A fused decoder layer over a static KV cache: five kernel launches in a step of up to eight rows, some more for more
rows and for prompts.

The five launches: norm, q, k and v; rotary embedding, cache write and attention; o and residual; norm, gate, up and
activation; down and residual. A norm after attention or MLP, with the residual, is one more launch each, and so is a
gate other than silu. StepCall and PromptCall have what the layers of one step, or of one prompt, share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from accelpatch.fusion.call import Call, Movable, is_whole, run_module
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.module_cache import PromptSlots, StepSlots
from accelpatch.fusion.signals import without_signals
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS, Signal
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.activation.gated_rows import gated_rows
from accelpatch.kernels.ops.activation.quantize_rows import QuantizedRows
from accelpatch.kernels.ops.attention.decode_attention import decode_attention_
from accelpatch.kernels.ops.attention.prompt_attention import Shown, module_mask, prompt_attention_, shown
from accelpatch.kernels.ops.attention.query_key import prepare_query_key_
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.query_key_form import QueryKey


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """One decoder layer.

    gate_up: for an MLP without a gate its first linear layer, with its activation; `activation`, the gate's, is None
    then. attention_norm, mlp_norm: before attention and MLP; after_attention, after_mlp: before the residual is added;
    None for none. prepare: what is done to q and k before attention. multiplier: the factor of both branches before
    they are added. parallel: the MLP reads the layer's input too; one norm at both places is computed once where rows
    are many. by_head: the columns of qkv are q, k and v of one head after the other (a launch more). across: the
    all-reduce of o and down in a tensor-parallel job, before norm and residual, or with the residual; None for none.
    """

    qkv: FusedLinear | AdaptedLinear
    attention_norm: FusedNorm | None
    attention: AttentionShape
    o: FusedLinear | AdaptedLinear
    gate_up: FusedLinear | AdaptedLinear
    mlp_norm: FusedNorm | None
    activation: str | None
    down: FusedLinear | AdaptedLinear
    after_attention: FusedNorm | None = None
    after_mlp: FusedNorm | None = None
    prepare: QueryKey | None = None
    multiplier: float = 1.0
    parallel: bool = False
    by_head: bool = False
    across: Callable[..., Tensor] | None = None

    def __call__(self, x: Tensor, pending: Tensor | None, call: Call, place: int) -> tuple[Tensor, Tensor | None]:
        """The layer on the rows x + pending[M, K]; returns (x, rest), the rest to be added by the next norm.

        call: positions, masks and cache, in which this layer's is at `place`.
        """
        if x.shape[0] > MAX_GEMV_ROWS:
            return self._many_rows(x, pending, call, place)
        x = x if pending is None else x + pending
        attended = self._attend(self.qkv(x, self.attention_norm), call, place)
        total = self._added(self.o, attended, self.after_attention, x)
        inner = self.gate_up(x if self.parallel else total, self.mlp_norm, gate=self.activation)
        return self._added(self.down, inner, self.after_mlp, total), None

    def _attend(self, qkv: Tensor, call: Call, place: int) -> Tensor:
        if self.by_head:
            qkv = qkv.view(len(qkv), -1, 3, self.attention.size).transpose(1, 2).reshape(len(qkv), -1)
        if self.prepare is not None:
            prepare_query_key_(qkv, call.positions.reshape(-1), self.prepare)
        return call.attend(qkv, self, place)

    def _added(self, last: FusedLinear | AdaptedLinear, x: Tensor, norm: FusedNorm | None, residual: Tensor) -> Tensor:
        """residual + multiplier norm(last(x))."""
        if self.multiplier == 1.0 and norm is None and self.across is None:
            return last(x, residual=residual)
        if self.multiplier == 1.0 and norm is None and self.across is not None:
            return self.across(last(x), residual)
        y = self._of_all(last(x))
        if self.multiplier != 1.0:
            return torch.add(residual, y if norm is None else _normed(norm, y, None)[0], alpha=self.multiplier)
        return residual + y if norm is None else norm.added(y, residual)

    def _of_all(self, y: Tensor) -> Tensor:
        """The sum over all ranks of their parts of an output."""
        return y if self.across is None else self.across(y)

    def _many_rows(self, x: Tensor, pending: Tensor | None, call: Call, place: int) -> tuple[Tensor, Tensor | None]:
        normal, x = _input_of(self.qkv, self.attention_norm, x, pending)
        attended = self._attend(self.qkv.large_m(normal), call, place)
        if self.parallel:
            same = self.mlp_norm is self.attention_norm and activations_of(self.qkv) == activations_of(self.gate_up)
            normal = normal if same else _input_of(self.gate_up, self.mlp_norm, x, None)[0]
        x, pending = self._with_residual(self.after_attention, self.o.large_m(attended), x)
        if not self.parallel:
            normal, x = _input_of(self.gate_up, self.mlp_norm, x, pending)
        elif pending is not None:
            x = x + pending
        return self._with_residual(self.after_mlp, cast(Any, self.down).large_m(self._inner(normal)), x)

    def _inner(self, normal: Any) -> Any:
        """The input of `down` for many rows; quantised at once, where `down` takes 8 bits and no GEMM has the gate
        fused."""
        inner, down = cast(Any, self.gate_up), self.down
        if self.activation is None or not isinstance(normal, QuantizedRows) or normal.q.dtype not in FP8:
            return inner.large_m(normal, self.activation)
        if activations_of(down) is None or not isinstance(inner, FusedLinear):
            return inner.large_m(normal, self.activation)
        weight = cast(W8A8Rows, cast(FusedLinear, down).weight)
        both: Tensor = inner.large_m(normal)
        made = gated_rows.function(both, self.activation, weight.input_scale, weight.w.dtype)
        return QuantizedRows(*made, both.dtype)

    def _with_residual(self, norm: FusedNorm | None, y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """(residual, y still to be added); with a norm, (residual + norm(y), None)."""
        y = self._of_all(y)
        if self.multiplier != 1.0:
            return residual, (y if norm is None else _normed(norm, y, None)[0]) * self.multiplier
        return (residual, y) if norm is None else (norm.added(y, residual), None)

    @property
    def attention_signal(self) -> Signal | None:
        """The producer-consumer flag that attention waits for, or None."""
        return self.qkv.producer if isinstance(self.qkv, FusedLinear) else None

    @functools.cached_property
    def without_attention_signal(self) -> FusedLayer:
        """This layer with attention that waits for the whole of q, k and v."""
        qkv: Any = without_signals(self.qkv)
        return replace(self, qkv=qkv) if isinstance(self.qkv, FusedLinear) else self

    @functools.cached_property
    def without_signals(self) -> FusedLayer:
        """This layer without flags between its kernels, for calls that may run concurrently with other steps."""
        parts: Any = {name: without_signals(getattr(self, name)) for name in ("qkv", "o", "gate_up", "down")}
        return replace(self, **parts)


def _normed(norm: FusedNorm | None, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(s), s) for s = x + pending; without a norm, (s, s)."""
    if norm is not None:
        return norm.of_sum(x, pending)
    x = x if pending is None else x + pending
    return x, x


def activations_of(layer: Any) -> tuple[Any, ...] | None:
    """A key that is equal for linear layers that can share quantised activations: their 8-bit format, and the address
    of their static scale, if they have one. None for a layer that takes floats."""
    if not isinstance(layer, FusedLinear) or not isinstance(layer.weight, W8A8Rows):
        return None
    scale = layer.weight.input_scale
    return (layer.weight.w.dtype, None if scale is None else scale.data_ptr())


def _input_of(
    layer: FusedLinear | AdaptedLinear, norm: FusedNorm | None, x: Tensor, pending: Tensor | None
) -> tuple[Any, Tensor]:
    """(norm(s) as the linear layer takes it, s) for s = x + pending."""
    if norm is None or activations_of(layer) is None:
        return _normed(norm, x, pending)
    assert isinstance(layer, FusedLinear)
    weight = cast(W8A8Rows, layer.weight)
    return norm.rows_of_sum(x, pending, weight.input_scale, weight.w.dtype)


@dataclass(eq=False)
class StepCall(Movable):
    """A decode step of T tokens a row, cached from slot[B] on; positions[B, T], mask[B, capacity] of earlier slots."""

    decoder: Any
    cache: Any
    positions: Tensor
    slot: Tensor
    mask: Tensor
    _seen: dict[int, Tensor] = field(default_factory=dict, init=False)

    def form(self, layer: Any) -> Any:
        """As in Call. Attention of several tokens waits for the whole of q, k and v."""
        return layer if self.positions.shape[1] == 1 else layer.without_attention_signal

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call."""
        cached = self.cache.layers[place]
        return decode_attention_(
            qkv, self.positions, self.slot, self.mask, cached.keys, cached.values, layer.attention, layer.o.weight.w,
            layer.attention_signal,
        )  # fmt: skip

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        own = self.slot[:, None] + torch.arange(self.positions.shape[1], device=x.device)

        def visible(window: int) -> Tensor:
            if window not in self._seen:
                at = torch.arange(self.mask.shape[1], device=x.device)
                seen = at <= own[:, :, None]
                if window:
                    seen = seen & (at > own[:, :, None] - window)
                self._seen[window] = (seen & (self.mask.ne(0) | (at >= self.slot[:, None]))[:, None])[:, None]
            return self._seen[window]

        return run_module(self.decoder, place, x, self.positions, visible, StepSlots(self.cache, place, own))


@dataclass(eq=False)
class PromptCall(Movable):
    """A prompt of L tokens a row, or a part of one, into the slots from `start` on, where the cache holds all tokens
    before; positions[B, L], mask[B, start + L] or None."""

    decoder: Any
    cache: Any
    positions: Tensor
    mask: Tensor | None
    start: int = 0
    _seen: dict[int, Shown] = field(default_factory=dict, init=False)
    _shown: dict[tuple[int, bool], Tensor | None] = field(default_factory=dict, init=False)  # to modules

    def seen(self, window: int) -> Shown:
        """What each token sees in layers with a window."""
        if window not in self._seen:
            self._seen[window] = shown(self.mask, self.start, self.positions.shape[1], window)
        return self._seen[window]

    def form(self, layer: Any) -> Any:
        """As in Call."""
        return layer.without_signals

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call."""
        cached, seen = self.cache.layers[place], self.seen(layer.attention.window)
        return prompt_attention_(qkv, self.positions, seen, cached.keys, cached.values, layer.attention, self.start)

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        length, whole = self.positions.shape[1], is_whole(layers_of(self.decoder)[place])
        keys = self.start + length
        plain = whole and self.mask is None and not self.start

        def visible(window: int) -> Tensor | None:
            key = window, plain and not 0 < window < keys
            if key not in self._shown:
                self._shown[key] = None if key[1] else module_mask(self.seen(window), length, keys, x)
            return self._shown[key]

        return run_module(
            self.decoder, place, x, self.positions, visible, PromptSlots(self.cache, place, self.start, length)
        )
