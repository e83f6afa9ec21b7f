"""A linear layer with LoRA adapters, and the norm before it, and gate and residual after it.

    adapted_linear   y[M, N] = gate(z + bias[N]) + residual[M, N], z = h @ w[N, K]^T + (h @ down[R, K]^T) @ up[N, R]^T,
                     h = norm(x[M, K])                                  LoRA: https://arxiv.org/abs/2106.09685

Few rows: one launch, whose blocks make a piece of h @ down^T each and then read w (hip/gemv/low_rank.h). Where the
weight's format has no such launch, and for many rows, three products follow each other (`operations`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.low_rank import SUFFIX, LowRank, function_why_not
from accelpatch.kernels.layouts.layout import Layout, WeightArguments
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated
from accelpatch.kernels.ops.linear import common, fused_linear
from accelpatch.kernels.ops.linear.fused_linear import INSIDE, FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.spec import Described, Implementation, Kernel, Spec

ADAPTED = "adapted_linear"


@dataclass(frozen=True, eq=False)
class AdaptedLinear(Described):
    """A linear layer and its LoRA adapters. base: without an activation. activation: as in FusedLinear."""

    base: FusedLinear
    low: LowRank
    activation: str | None = None

    @property
    def weight(self) -> Layout:
        """The base layer's weight as it lies in memory."""
        return self.base.weight

    @functools.cached_property
    def facts(self) -> Hashable:
        """The base layer's, and the ranks."""
        return self.base.facts, self.low.ranks, self.low.rank, self.activation

    @functools.cached_property
    def launched(self) -> WeightArguments:
        """The weight as the function with adapters inside takes it."""
        launched = self.weight.launch()
        return replace(launched, function=launched.function + SUFFIX)

    @functools.cached_property
    def down(self) -> FusedLinear:
        """The adapters' first factor as a layer."""
        return FusedLinear(Plain(self.low.down))

    @functools.cached_property
    def up(self) -> FusedLinear:
        """The adapters' second factor as a layer."""
        return FusedLinear(Plain(self.low.wide_up()))

    @functools.cached_property
    def alone(self) -> AdaptedLinear:
        """The same for calls that may run concurrently with others: each launch is given synchronisation words of its
        own."""
        made = replace(self, low=replace(self.low, words=None))
        vars(made).update(down=self.down, up=self.up)
        return made

    def __call__(
        self, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As FusedLinear.__call__."""
        y: Tensor = dispatch.run(ADAPTED, spec, x.device, (self, x, norm, gate, residual))
        return y

    def large_m(self, x: Tensor, gate: str | None = None) -> Tensor:
        """As FusedLinear.large_m."""
        y = self.base.large_m(x) + self.up.large_m(self.down.large_m(x))
        return self._activated(y) if gate is None else gated(y, gate)

    def _activated(self, y: Tensor) -> Tensor:
        return y if self.activation is None else ACTIVATIONS[self.activation](y)

    def inside(self, gate: str | None) -> bool:
        """Whether a launch of the device library can apply the gate or the activation too."""
        if self.base.prefer or self.weight.order is not None or self.base.signals:
            return False
        if gate is not None:
            return self.base.gates(gate)
        return self.weight.part == "all" and (self.activation is None or self.activation in INSIDE)


def reference(
    layer: AdaptedLinear, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The references of the single operations."""
    h = x if norm is None else norm.reference(x)
    y = fused_linear.reference(layer.base, h)
    y = y + h @ layer.low.down.to(h.dtype).T @ layer.low.wide_up().to(h.dtype).T
    y = layer._activated(y)
    if gate is not None:
        first, second = y.chunk(2, dim=-1)
        y = gated_activation.reference(first, second, gate)
    return y if residual is None else residual + y


def spec(
    layer: AdaptedLinear, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None,
    residual: Tensor | None = None,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for an x that does not fit."""
    of_base = fused_linear.spec(layer.base, x)
    return replace(
        of_base, op=ADAPTED, options={**of_base.options, "inside": layer.inside(gate), "ranks": layer.low.ranks}
    )


def hip_why_not(spec: Spec, device: Device) -> str | None:
    """Why one launch cannot run a spec; None where it can."""
    function, variant = spec.options.get("function", ("gemv", ""))
    if reason := function_why_not(function, spec.options.get("ranks", 1)):
        return reason
    if not spec.options.get("inside", True):
        return "no launch with adapters inside has its gate, its activation or its order of columns"
    reason = binding.why_not(spec, device, function + SUFFIX, variant)
    return reason or common.too_many_rows(spec, binding.MAX_ROWS)


def by_hip(
    layer: AdaptedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None
) -> Tensor:
    """The implementation `hip`: one launch."""
    return binding.launch(
        layer.launched, x, bias=layer.base.bias, residual=residual,
        activation="silu_gate" if gate is not None else INSIDE.get(layer.activation or "", "none"),
        norm="none" if norm is None else norm.kind, norm_weight=None if norm is None else norm.weight,
        norm_bias=None if norm is None else norm.bias, epsilon=0.0 if norm is None else norm.eps, low_rank=layer.low,
    )  # fmt: skip


def by_operations(
    layer: AdaptedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None
) -> Tensor:
    """The implementation `operations`: three fused linear layers, and a gate or an activation behind them."""
    alone = gate is None and layer.activation is None
    y = layer.base(x, norm, residual=residual if alone else None)
    y = layer.up(layer.down(x, norm), residual=y)
    if alone:
        return y
    y = layer._activated(y) if gate is None else gated_activation.gated_activation(*y.chunk(2, dim=-1), gate)
    return y if residual is None else residual + y


KERNELS: dict[str, Kernel] = {
    ADAPTED: Kernel(
        AdaptedLinear.__call__, reference, spec,
        {"hip": Implementation(by_hip, hip_why_not), "operations": Implementation(by_operations, dispatch.anywhere)},
        composed=True,
    ),
}  # fmt: skip
