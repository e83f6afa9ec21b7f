"""A linear layer with the norm before it, and gate and residual after it.

    fused_linear     y[M, N] = gate(norm(x[M, K]) @ w[N, K]^T + bias[N]) + residual[M, N]     few rows: one launch
    large_m_linear   y[M, N] = gate(x[M, K] @ w[N, K]^T + bias[N])                               any number of rows

Norm, gate (an activation of the first half of the columns, times the second half) and residual are optional; in place
of a gate the layer may have an activation of all columns. A gate is a separate launch where it is not silu, or where a
weight's tiles are not interleaved. Where no one launch serves, as on a CPU, single operations run (`operations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.layouts.tiled import in_order, in_tiles
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated
from accelpatch.kernels.ops.activation.quantize_rows import QuantizedRows
from accelpatch.kernels.ops.linear import common, w8a8_linear
from accelpatch.kernels.ops.linear.by_layout import LINEARS, LinearOf
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm, reordered
from accelpatch.kernels.spec import Described, Implementation, Kernel, Spec

SILU = ("silu", "swish")
# activation of all columns -> its name among those of the device library
INSIDE = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
FUSED, LARGE_M = "fused_linear", "large_m_linear"


@dataclass(frozen=True, eq=False)
class FusedLinear(Described):
    """A linear layer: a weight in any layout of `LINEARS`, and bias[N] in x's dtype.

    activation: of y before the residual, a name of `gated_activation.ACTIVATIONS`. producer: flag for the columns of y,
    if a call is `one_launch`. consumer: flag for the columns of x. Reordering x for the weight's `order`, with the
    norm, is a launch of its own. prefer: a user's implementation, which runs apart from norm, gate and residual.
    """

    weight: Layout
    bias: Tensor | None = None
    producer: Signal | None = None
    consumer: Signal | None = None
    activation: str | None = None
    prefer: str = ""

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return self.weight.n

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return self.weight.k

    @functools.cached_property
    def facts(self) -> Hashable:
        """The weight's format and size, whether there is a bias, whether there are flags."""
        of = self.weight
        return of.format, self.n, of.part, self.bias is None, self.signals, of.order is None, self.prefer

    @property
    def signals(self) -> bool:
        """Whether a launch sets or waits for a flag."""
        return self.producer is not None or self.consumer is not None

    def why_not(self, dtype: torch.dtype, device: Device) -> str | None:
        """Why `__call__` cannot run for x of `dtype`; None where it can."""
        if device.kind == "cpu" or self.prefer:
            return None
        options = {"function": self.function}
        return hip_why_not(Spec(FUSED, {"M": 1, "N": self.n, "K": self.k}, dtype, options=options), device)

    @functools.cached_property
    def function(self) -> tuple[str, str]:
        """The function of the device library that reads the weight, and its variant."""
        launched = self.weight.launch()
        return launched.function, launched.variant

    def __call__(
        self, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """y in x's dtype. x[M, K] contiguous, M up to `binding.MAX_ROWS`. gate: name of an activation."""
        y: Tensor = dispatch.run(FUSED, spec, x.device, (self, x, norm, gate, residual))
        return y

    def one_launch(self, gate: str | None = None) -> bool:
        """Whether a call is a single launch on a GPU that writes the result itself."""
        plain = gate is None and self.weight.part == "all" and not self.prefer
        return self.gates(gate) or (plain and (self.activation is None or self.activation in INSIDE))

    def large_m(self, x: Tensor | QuantizedRows, gate: str | None = None) -> Tensor:
        """gate(x[M, K] @ w^T + bias) for any M. It bypasses torch's dispatcher, which saves host time."""
        if self.weight.order is not None:
            assert isinstance(x, Tensor)
            return self.in_order.large_m(reordered(x, self.weight.order, None), gate)
        if self.activation is not None:
            return ACTIVATIONS[self.activation](self.without_activation.large_m(x))
        if self.prefer:
            y: Tensor = self.linear.operation.function(x, *self.weight.arguments(), self.bias, self.prefer)
            return y if gate is None else gated(y, gate)
        if isinstance(x, QuantizedRows):
            return w8a8_linear.of_rows(x, self.weight.w, self.weight.scale, self.bias, gate)  # type: ignore[attr-defined]
        if gate is None and (x.shape[0] < choice.WRITTEN_OUT or self.many is None):
            return self.linear.operation.function(x, *self.weight.arguments(), self.bias)
        facts = self.linear.facts(x, *self.weight.arguments()) if self.gates(gate) else ()
        return cast(Tensor, dispatch.run(LARGE_M, large_m_spec, x.device, (self, x, gate), facts))

    @functools.cached_property
    def without_activation(self) -> FusedLinear:
        """This layer without its activation."""
        return replace(self, activation=None)

    @functools.cached_property
    def in_order(self) -> FusedLinear:
        """This layer for an x whose columns are in the weight's order."""
        return replace(self, weight=replace(cast(Any, self.weight), order=None))

    @functools.cached_property
    def many(self) -> Callable[[Tensor], Tensor] | None:
        """The layout's function for rows from `choice.WRITTEN_OUT` on, or None."""
        many = self.linear.many
        return None if many is None else many(self.weight, self.bias)

    @property
    def linear(self) -> LinearOf:
        """The weight's row of `LINEARS`."""
        return LINEARS[type(self.weight)]

    def gates(self, gate: str | None) -> bool:
        """Whether a launch can apply the gate itself."""
        return gate in SILU and not self.prefer and (self.weight.part == "both" or not self.weight.tiled)

    def _by_operations(self, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None) -> Tensor:
        if norm is not None:
            x = norm(x)
        y = self.large_m(x, gate)
        return y if residual is None else residual + y


def reference(
    layer: FusedLinear, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The references of the single operations."""
    if norm is not None:
        x = norm.reference(x)
    if layer.weight.order is not None:
        x = x[:, layer.weight.order.long()]
    of_weight: Any = dispatch.kernel(layer.linear.op).reference
    y: Tensor = of_weight(x, *layer.weight.arguments(), layer.bias)
    if layer.activation is not None:
        y = ACTIVATIONS[layer.activation](y)
    if gate is not None:
        first, second = y.chunk(2, dim=-1)
        y = gated_activation.reference(first, second, gate)
    return y if residual is None else residual + y


def spec(
    layer: FusedLinear, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None,
    residual: Tensor | None = None,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for an x that does not fit."""
    require(x.shape[-1] == layer.k, FUSED, f"x has {x.shape[-1]} features, the weight {layer.k}")
    sizes = {"M": x.shape[:-1].numel(), "N": layer.n, "K": layer.k}
    function = {"function": layer.function} if x.is_cuda else {}  # a CPU's pack has none
    return Spec(FUSED, sizes, x.dtype, options={"signals": layer.signals, "prefer": layer.prefer, **function})


def hip_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    if own := spec.options.get("prefer"):
        return f"its linear layer runs by {own}"
    reason = binding.why_not(spec, device, *spec.options.get("function", ("gemv",)))
    return reason or common.too_many_rows(spec, binding.MAX_ROWS)


def by_hip(layer: FusedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None) -> Tensor:
    """The implementation `hip`: one launch, and one more for a gate that it cannot apply, or for another order."""
    if layer.weight.order is not None:
        return by_hip(layer.in_order, reordered(x, layer.weight.order, norm), None, gate, residual)
    part, one = layer.weight.part, layer.gates(gate)
    mixed = part != "all" and not one  # interleaved output columns have to be reordered
    activation = "silu_gate" if one else INSIDE.get(layer.activation or "", "none")
    after = layer.activation if layer.activation not in INSIDE else None
    inside = not mixed and (gate is None or one) and after is None
    bias = in_tiles(layer.bias, part) if mixed else layer.bias
    y = binding.launch(
        layer.weight.launch(), x, bias=bias, residual=residual if inside else None,
        activation=activation,
        norm="none" if norm is None else norm.kind, norm_weight=None if norm is None else norm.weight,
        norm_bias=None if norm is None else norm.bias, epsilon=0.0 if norm is None else norm.eps,
        producer=layer.producer, consumer=layer.consumer,
    )  # fmt: skip
    y = in_order(y, part) if mixed else y
    if gate is not None and not one:
        y = gated(y, gate)
    y = y if after is None else ACTIVATIONS[after](y)
    return y if residual is None or inside else residual + y


def operations_why_not(spec: Spec, device: Device) -> str | None:
    """Why the single operations cannot run: on a GPU they set no flag that the next kernel waits for."""
    signals = spec.options.get("signals", False) and device.kind != "cpu"
    return "other kernels wait for the flag that its launch sets" if signals else None


def by_operations(
    layer: FusedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None
) -> Tensor:
    """The implementation `operations`: norm, linear layer, gate and residual one after the other."""
    return layer._by_operations(x, norm, gate, residual)


def large_m_spec(layer: FusedLinear, x: Tensor, gate: str | None) -> Spec:
    """The Spec of a call, for dispatch. of_weight: of the linear operation, where its launch may apply the gate."""
    sizes, row = spec(layer, x).sizes, layer.linear
    options: dict[str, Any] = {"weight": row.op, "gate": gate, "gated": row.gated}
    options["many"] = gate is None and layer.many is not None
    if layer.gates(gate) and row.gated:
        options["of_weight"] = dispatch.kernel(row.op).spec(x, *layer.weight.arguments(), layer.bias)
    return Spec(LARGE_M, sizes, x.dtype, options=options)


def _gate_why_not(name: str, spec: Spec, device: Device) -> str | None:
    """Why the layout's implementation `name` cannot compute the linear layer and its gate in one launch."""
    of_weight: Spec | None = spec.options.get("of_weight")
    if of_weight is None or name not in spec.options["gated"]:
        return "it has no launch with this gate for this layout"
    with_facts = replace(of_weight, options={**of_weight.options, **spec.options})
    return dispatch.why_not(of_weight.op, name, with_facts, device)


def hip_gemm_why_not(spec: Spec, device: Device) -> str | None:
    """Why `hip_gemm`, a GEMM of the device library with the gate inside, cannot run a spec; None where it can."""
    return _gate_why_not("hip_gemm", spec, device)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `triton`, a GEMM with the gate inside or of a weight written out once, cannot run; None where it can."""
    if spec.options["gate"] is not None:
        return _gate_why_not("triton", spec, device)
    return None if spec.options["many"] and device.kind != "cpu" else "it prepares no weight for this layout"


def by_hip_gemm(layer: FusedLinear, x: Tensor, gate: str | None) -> Tensor:
    """The implementation `hip_gemm`."""
    return layer.linear.gated["hip_gemm"](x, layer.weight, layer.bias)


def by_triton(layer: FusedLinear, x: Tensor, gate: str | None) -> Tensor:
    """The implementation `triton`."""
    if gate is not None:
        return layer.linear.gated["triton"](x, layer.weight, layer.bias)
    assert layer.many is not None
    return layer.many(x)


def large_m_by_operations(layer: FusedLinear, x: Tensor, gate: str | None) -> Tensor:
    """The implementation `operations`: the layout's linear operation, then the gate."""
    if gate is not None:
        return gated(layer.large_m(x), gate)
    return layer.linear.operation.function(x, *layer.weight.arguments(), layer.bias)


def large_m_reference(layer: FusedLinear, x: Tensor, gate: str | None) -> Tensor:
    """As `reference`."""
    return reference(layer, x, gate=gate)


KERNELS = {
    FUSED: Kernel(
        FusedLinear.__call__, reference, spec,
        {"hip": Implementation(by_hip, hip_why_not), "operations": Implementation(by_operations, operations_why_not)},
        composed=True,
    ),
    LARGE_M: Kernel(
        FusedLinear.large_m, large_m_reference, large_m_spec,
        {
            "hip_gemm": Implementation(by_hip_gemm, hip_gemm_why_not),
            "triton": Implementation(by_triton, triton_why_not),
            "operations": Implementation(large_m_by_operations, dispatch.anywhere),
        },
        composed=True,
    ),
}  # fmt: skip
