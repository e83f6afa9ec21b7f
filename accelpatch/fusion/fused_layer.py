"""A decoder layer of Llama's form in five kernel launches.

The launches: norm, q, k and v; rotary embedding, cache write and attention; o and residual; norm, gate, up and
activation; down and residual. Norms after attention and MLP, with the residual, are one more launch each, and so is a
gate other than silu.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from accelpatch.fusion.adapters import Adapted
from accelpatch.fusion.call import Call
from accelpatch.fusion.signals import without_signals
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS, Signal
from accelpatch.kernels.ops.attention_shape import AttentionShape
from accelpatch.kernels.ops.fused_linear import FusedLinear, FusedNorm, normed


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

    def __call__(self, x: Tensor, pending: Tensor | None, call: Call, place: int) -> tuple[Tensor, Tensor | None]:
        """The layer on the rows x + pending[M, K]; returns (x, rest), the rest to be added by the next norm.

        call: positions, masks and cache, in which this layer's is at `place`.
        """
        if x.shape[0] > MAX_GEMV_ROWS:
            return self._many_rows(x, pending, call, place)
        x = x if pending is None else x + pending
        attended = call.attend(self.qkv(x, self.attention_norm), self, place)
        x = _added(self.o, attended, self.after_attention, x)
        return _added(self.down, self.gate_up(x, self.mlp_norm, gate=self.activation), self.after_mlp, x), None

    def _many_rows(self, x: Tensor, pending: Tensor | None, call: Call, place: int) -> tuple[Tensor, Tensor | None]:
        normal, x = normed(self.attention_norm, x, pending)
        attended = call.attend(self.qkv.large_m(normal), self, place)
        x, pending = _beside(self.after_attention, self.o.large_m(attended), x)
        normal, x = normed(self.mlp_norm, x, pending)
        return _beside(self.after_mlp, self.down.large_m(self.gate_up.large_m(normal, self.activation)), x)

    @property
    def attention_signal(self) -> Signal | None:
        """The producer-consumer flag that attention waits for, or None."""
        return self.qkv.producer if isinstance(self.qkv, FusedLinear) else None

    @functools.cached_property
    def without_attention_signal(self) -> FusedLayer:
        """This layer with attention that waits for the whole of q, k and v."""
        return replace(self, qkv=without_signals(self.qkv))

    @functools.cached_property
    def without_signals(self) -> FusedLayer:
        """This layer without flags between its kernels, for calls that may run beside other steps."""
        parts: Any = {name: without_signals(getattr(self, name)) for name in ("qkv", "gate_up", "down")}
        return replace(self, **parts)


def _added(last: FusedLinear | Adapted, x: Tensor, norm: FusedNorm | None, residual: Tensor) -> Tensor:
    """residual + last(x), or residual + norm(last(x))."""
    return last(x, residual=residual) if norm is None else norm.added(last(x), residual)


def _beside(norm: FusedNorm | None, y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """(residual, y still to be added); with a norm, (residual + norm(y), None)."""
    return (residual, y) if norm is None else (norm.added(y, residual), None)
