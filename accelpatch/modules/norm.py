"""RMSNorm, and decoder layers that add the residual and normalise in one operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.ops.norm.rmsnorm import add_rmsnorm, rmsnorm
from accelpatch.modules.replacement import Replacement, intact, is_observed

SMOOTHED = "it is smoothed by statistics of its own weights and takes no others: unpatch, load, and patch again"


DIVIDED = 101  # version, in a state dict's metadata, of a norm with divided parameters


class SmoothableNorm(Replacement):
    """A norm that may have parameters of its own, divided for the layers that read it.

    divided: their names. dtypes: the dtypes that the model was cast to since the patch.
    """

    divided: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = [self._parameters[name] for name in self.divided]
        dtypes = [None if one is None else one.dtype for one in before]
        super()._apply(fn, recurse)
        now = [self._parameters[name] for name in self.divided]
        if dtypes and now[0] is not None and now[0].dtype != dtypes[0]:
            self.dtypes = (*self.dtypes, now[0].dtype)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Divided parameters take values from a patched model's state alone, which says so in its metadata."""
        given = {name: state_dict.get(prefix + name) for name in self.divided}
        same = all(one is None or _alike(one, self._parameters[name]) for name, one in given.items())
        if not same and metadata.get("version") != DIVIDED:
            errors.append(f"{prefix.rstrip('.')}: {SMOOTHED}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def hand_back(self, original: nn.Module) -> bool:
        """Move and cast the original's parameters as these were; what was written into these does not go there."""
        anything = next((one for one in (*self._parameters.values(), *self._buffers.values()) if one is not None), None)
        for name, parameter in original._parameters.items():
            if parameter is None or anything is None:
                continue
            data = parameter.data
            for dtype in self.dtypes if name in self.divided else ():
                data = data.to(dtype)
            parameter.data = data.to(anything.device)
            own = self._parameters.get(name)
            if name in self.divided and own is not None and not parameter.is_inference():
                parameter.requires_grad_(own.requires_grad)
        return False


class FusedRMSNorm(SmoothableNorm):
    """x / rms(x) * weight in one operation. eps_name: the original's epsilon attribute. plus_one: use 1 + weight."""

    weight: Tensor
    eps_name: str
    plus_one: bool

    @property
    def rms_eps(self) -> float:
        """The epsilon that is added to the mean of squares."""
        return float(getattr(self, self.eps_name))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states[..., K] -> [..., K]."""
        return rmsnorm(hidden_states, self.weight, self.rms_eps, self.plus_one)


class SmoothedLayerNorm(SmoothableNorm):
    """torch's LayerNorm with a weight and a bias of its own, divided for the layers that read it."""


def _alike(one: Tensor, own: Tensor | None) -> bool:
    return own is not None and torch.equal(one.to(own.device, own.dtype), own)


def with_own(new: SmoothableNorm, **tensors: Tensor | None) -> None:
    """Give a replaced norm parameters of its own in place of those that it has from the original."""
    new.dtypes = ()  # an attribute of the replacement alone, which unpatch leaves there
    for name, tensor in tensors.items():
        before = new._parameters.get(name)
        if before is not None and tensor is not None:
            new._parameters[name] = nn.Parameter(tensor.to(before.dtype), requires_grad=before.requires_grad)
            new.divided, new._version = (*new.divided, name), DIVIDED


class ResidualNormLayer(Replacement):
    """A decoder layer that adds the residual and computes the next norm in one operation.

    For layers of the form norm, attention, add, norm, MLP, add (Llama), and for those that also have a norm after
    attention and after the MLP (Gemma 2 and 3). norms: the names of its norms by place: attention_norm, mlp_norm, and
    after_attention and after_mlp where it has them. plain: it runs the original's forward, which has another form:
    without a norm before the MLP (OLMo 2), or with a multiplier of the residual branches (Granite). Children, names and
    hooks stay; hooks on the norm still run. Decode steps and prompts run the fused layer that is made of it
    (accelpatch/fusion), where there is one.
    """

    norms: Mapping[str, str]
    plain: bool
    norm_class: type[nn.Module]
    eps_name: str
    plus_one: bool
    positional: tuple[str, ...]
    self_attn: nn.Module
    mlp: nn.Module

    def norm(self, place: str) -> Any:
        """The norm at a place; None where the layer has none there."""
        name = self.norms.get(place)
        return None if name is None else getattr(self, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states[B, L, K] -> [B, L, K]; the other arguments are passed to the attention."""
        if self.plain or not intact(self):
            return super().forward(hidden_states, *args, **kwargs)
        kwargs.update(zip(self.positional, args, strict=False))
        after_attention, after_mlp = self.norm("after_attention"), self.norm("after_mlp")
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.norm("attention_norm")(hidden_states), **kwargs)
        if after_attention is not None:
            hidden_states = after_attention(hidden_states)
        hidden_states, residual = self._add_norm(self.norm("mlp_norm"), hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return residual + (hidden_states if after_mlp is None else after_mlp(hidden_states))

    def _add_norm(self, norm: nn.Module, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_known(norm) or is_observed(norm):
            total = residual + hidden_states
            return norm(total), total
        assert isinstance(norm.weight, Tensor)
        return add_rmsnorm(hidden_states, residual, norm.weight, getattr(norm, self.eps_name), self.plus_one)

    def _is_known(self, norm: nn.Module) -> bool:
        """Whether a norm is the original or its FusedRMSNorm, not one that PEFT wraps or that the user put in."""
        own = type(norm)
        return own is self.norm_class or (isinstance(norm, FusedRMSNorm) and issubclass(own, self.norm_class))


def positional_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the arguments after hidden_states in the layer's forward, for callers that pass them by position."""
    names = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    return tuple(p.name for p in names if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
