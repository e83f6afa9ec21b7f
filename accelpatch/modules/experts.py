"""A layer's experts (3-D weights, as transformers has them), in their own precision or quantised.

transformers calls them with the tokens' hidden states, and the indices and weights of each token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from accelpatch import own_code
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.operation import wants_gradient
from accelpatch.kernels.ops.experts.experts import experts
from accelpatch.modules.replacement import Replacement, adopt

SETTING = "_experts_implementation"  # the attribute of a configuration that holds the implementation's name
IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")  # transformers' own
UP, DOWN = "gate_up_proj", "down_proj"
FEW = 64  # tokens; transformers' grouped product is a match for more, and its other one gathers whole weights


@dataclass(frozen=True)
class ExpertsForm:
    """What experts compute, read off their module.

    activation, alpha, limit: as the operation takes them. transposed: weights lie as [E, K, N]. interleaved: rows of
    gate and up alternate. bias: whether they have biases.
    """

    activation: str
    alpha: float = 0.0
    limit: float = 0.0
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False


def implementation_why_not(module: Any) -> str | None:
    """Why a module's experts run by an implementation that a user registered; None where by one of transformers'."""
    used = getattr(getattr(module, "config", None), SETTING, None)
    return None if used in IMPLEMENTATIONS else f"the experts implementation is {used}"


def form_of(module: nn.Module, activations: Any, clamped: Any) -> ExpertsForm | str:
    """The form of a module with experts, or why it has none that is known.

    activations: class of an activation -> its name. clamped: names of classes whose gate is the clamped SwiGLU.
    """
    own: Any = module
    name = type(module).__name__
    wanted = {UP, DOWN} | ({f"{UP}_bias", f"{DOWN}_bias"} if getattr(own, "has_bias", False) else set())
    if not getattr(own, "has_gate", False) or getattr(own, "has_post_expert_norm", False):
        return f"{name} has no gated experts by transformers' experts interface"
    if reason := implementation_why_not(module):
        return reason
    present = {key: one for key, one in module._parameters.items() if one is not None}
    if present.keys() != wanted or any(present[key].dim() != 3 for key in (UP, DOWN)):
        return f"{name} has the weights {', '.join(present) or 'of an adapter'}, and {UP} and {DOWN} are known"
    shape = {"transposed": own.is_transposed, "interleaved": not own.is_concatenated, "bias": own.has_bias}
    if name in clamped:
        return ExpertsForm("clamped_swiglu", float(own.alpha), float(own.limit), **shape)
    if type(module)._apply_gate is not moe._default_apply_gate:  # type: ignore[attr-defined]
        return f"{name} has a gate of its own, which is not known"
    function = getattr(module, "act_fn", None)
    activation = activations.get(type(function).__name__)
    if activation is None or own_code.why_not(function):
        return f"the activation of {name} is not known here"
    return ExpertsForm(activation, **shape)


def rows_of(form: ExpertsForm, name: str, weight: Tensor) -> Tensor:
    """A weight (or its bias) in the operation's order, [E, N, K] or [E, N]: a view where it lies so already."""
    return in_order(form, name, weight.transpose(1, 2) if form.transposed and weight.dim() == 3 else weight)


def in_order(form: ExpertsForm, name: str, rows: Tensor) -> Tensor:
    """Rows [E, N, ...] of a weight in the operation's order: those of gate, then those of up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if form.interleaved and name.startswith(UP) else rows


def original_of(form: ExpertsForm, name: str, rows: Tensor) -> Tensor:
    """The inverse of `rows_of`."""
    if form.interleaved and name.startswith(UP):
        rows = torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
    return rows.transpose(1, 2).contiguous() if form.transposed and rows.dim() == 3 else rows


class Experts(Replacement):
    """Base: takes transformers' call, and hands the rest to `compute`."""

    form: ExpertsForm

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """y[T, H] of hidden_states[T, H]; then indices[T, k] and weights[T, k], by place or under the family's names.

        Indices out of range, which other devices have (expert parallelism), add nothing. An implementation that the
        user registered and chose since runs in the place of this one.
        """
        if implementation_why_not(self) is not None:
            return cast(Tensor, super().forward(hidden_states, *routing, **named))
        given = [*routing, *named.values()]
        ids = next(one for one in given if not one.is_floating_point())
        weights = next(one for one in given if one.is_floating_point())
        return self.compute(hidden_states, ids, weights)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """The experts' weighted sum; with residual[T, H] added."""
        raise NotImplementedError

    def why_not_routed(self, chosen: int, dtype: torch.dtype) -> str | None:
        """Why `compute_routed` takes no fewer launches for a few tokens in `dtype`, `chosen` experts each; or None."""
        return "its experts are not 4-bit codes"

    def compute_routed(
        self, x: Tensor, norm: tuple[Tensor, float, bool], logits: Tensor, choice: tuple[int, bool, bool],
        residual: Tensor,
    ) -> Tensor:  # fmt: skip
        """residual + the weighted sum for norm(x[T, H]) of the experts that a router's logits[T, E] choose.

        norm: weight, epsilon and plus_one of an RMSNorm. choice: top_k, normalise and narrow, as in `choose_experts`.
        """
        raise NotImplementedError

    @property
    def gate(self) -> tuple[str, float, float]:
        """Activation, alpha and limit."""
        return self.form.activation, self.form.alpha, self.form.limit


class FloatExperts(Experts):
    """Experts with the original's own weights; for few tokens by kernels that read the chosen ones alone."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        trained = wants_gradient((getattr(self, UP), self.down_proj))
        if (len(x) <= FEW or dispatch.watched()) and x.dtype == self.down_proj.dtype and not trained:
            return experts(x, ids, weights, *self.stack(UP), *self.stack(DOWN), *self.gate, residual)
        y: Tensor = super(Experts, self).forward(x, ids, weights)
        return y if residual is None else residual + y

    def stack(self, name: str) -> Stack:
        """A weight as the operation takes it."""
        return Stack(getattr(self, name), bias=getattr(self, f"{name}_bias", None))  # which may be parametrized


def floats(original: nn.Module, form: ExpertsForm) -> FloatExperts:
    """FloatExperts that share the original's weights."""
    new = adopt(FloatExperts, original)
    new.form = form
    return new
