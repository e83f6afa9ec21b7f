"""RMSNorm, and decoder layers that add the residual and normalise in one operation."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from accelpatch.kernels.rmsnorm import add_rmsnorm, rmsnorm
from accelpatch.modules.replacement import intact, is_observed


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight in one operation. `rms_eps` and `plus_one` (weight counts from 1) come from the original."""

    weight: Tensor
    rms_eps: float
    plus_one: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states[..., K] -> [..., K]."""
        return rmsnorm(hidden_states, self.weight, self.rms_eps, self.plus_one)


# Children that a replaced layer calls; others, such as a dropout that drops nothing, it skips.
CALLED = frozenset(
    {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
)


class ResidualNormLayer(nn.Module):
    """A decoder layer whose residual addition and the norm after it are one operation.

    For layers of the form norm, attention, add, norm, MLP, add (Llama), and for those with a norm after attention
    and after the MLP too (Gemma 2 and 3: `sandwich`). Children, names and hooks stay; a hook on the norm is served.
    """

    sandwich: bool
    skips: tuple[tuple[str, nn.Module], ...]
    positional: tuple[str, ...]
    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states[B, L, K] -> [B, L, K]; the other arguments go to the attention as they are."""
        if not intact(self):
            return super().forward(hidden_states, *args, **kwargs)
        kwargs.update(zip(self.positional, args, strict=False))
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if self.sandwich:
            hidden_states = self.post_attention_layernorm(hidden_states)
            hidden_states, residual = self._add_norm(self.pre_feedforward_layernorm, hidden_states, residual)
            return residual + self.post_feedforward_layernorm(self.mlp(hidden_states))
        hidden_states, residual = self._add_norm(self.post_attention_layernorm, hidden_states, residual)
        return residual + self.mlp(hidden_states)

    def _add_norm(self, norm: nn.Module, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(norm, FusedRMSNorm) or is_observed(norm):  # kept, wrapped by PEFT, or the user's own
            total = residual + hidden_states
            return norm(total), total
        return add_rmsnorm(hidden_states, residual, norm.weight, norm.rms_eps, norm.plus_one)


def positional_names(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's arguments after hidden_states, in order, for callers that pass them by position."""
    names = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    return tuple(p.name for p in names if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
