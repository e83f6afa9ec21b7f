"""A linear layer with the norm before it, and gate and residual after it, in one launch on a GPU.

    y[M, N] = gate(rmsnorm(x[M, K]) @ w[N, K]^T + bias[N]) + residual[M, N]

Norm, gate (an activation of the first half of the columns, times the second half) and residual are optional. A gate is
a separate launch where it is not silu, or where a weight's tiles are not interleaved. On a CPU the single operations
run one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts import int4_tiles
from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.ops import gated_activation, gemv, rmsnorm
from accelpatch.kernels.ops.by_layout import LINEARS

SILU = ("silu", "swish")


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """RMSNorm with weight[K] in the activations' dtype; plus_one: multiply by 1 + weight and round once."""

    weight: Tensor
    eps: float
    plus_one: bool = False

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x)."""
        return rmsnorm.rmsnorm_add(x, residual, self.weight, self.eps, self.plus_one)


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """A linear layer: a weight in any layout of `LINEARS`, and bias[N] in x's dtype.

    producer: flag for the columns of y, if a call is `one_launch`. consumer: flag for the columns of x.
    """

    weight: Layout
    bias: Tensor | None = None
    producer: Signal | None = None
    consumer: Signal | None = None

    @property
    def raw(self) -> Tensor:
        """The weight's main tensor, without scales."""
        return self.weight.w

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return self.weight.n

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return self.weight.k

    def why_not(self, dtype: torch.dtype, device: Device) -> str | None:
        """Why `__call__` cannot run for x of `dtype`; None where it can."""
        if device.kind == "cpu":
            return None
        return binding.why_not(gemv.of_shape(self.n, self.k, dtype), device)

    def __call__(
        self, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """y in x's dtype. x[M, K] contiguous, M up to `binding.MAX_ROWS`. gate: name of an activation."""
        if x.device.type == "cpu":
            return self._by_operations(x, norm, gate, residual)
        part, one = self.weight.part, self._gates(gate)
        mixed = part != "all" and not one  # interleaved output columns have to be reordered
        inside = not mixed and (gate is None or one)
        bias = int4_tiles.in_tiles(self.bias, part) if mixed else self.bias
        y = binding.launch(
            self.weight.launch(), x, bias=bias, residual=residual if inside else None,
            activation="silu_gate" if one else "none",
            norm="none" if norm is None else "rms_plus_one" if norm.plus_one else "rms",
            norm_weight=None if norm is None else norm.weight, epsilon=0.0 if norm is None else norm.eps,
            producer=self.producer, consumer=self.consumer,
        )  # fmt: skip
        y = int4_tiles.in_order(y, part) if mixed else y
        if gate is not None and not one:
            y = gated(y, gate)
        return y if residual is None or inside else residual + y

    def one_launch(self, gate: str | None = None) -> bool:
        """Whether a call is a single launch on a GPU that writes the result itself."""
        return self._gates(gate) or (gate is None and self.weight.part == "all")

    def large_m(self, x: Tensor, gate: str | None = None) -> Tensor:
        """gate(x[M, K] @ w^T + bias) for any M. On a GPU it bypasses torch's dispatcher, which saves host time."""
        cpu, linear = x.device.type == "cpu", LINEARS[type(self.weight)]
        if gate is not None:
            y = linear.gated(x, self.weight, self.bias) if linear.gated and self._gates(gate) else None
            return gated(self.large_m(x), gate) if y is None else y
        if not cpu and x.shape[0] > binding.MAX_ROWS and self._many is not None:
            return self._many(x)
        y = (linear.operation if cpu else linear.by_hip)(x, *self.weight.arguments(), self.bias)
        assert y is not None
        return y

    @functools.cached_property
    def _many(self) -> Callable[[Tensor], Tensor] | None:
        many = LINEARS[type(self.weight)].many
        return None if many is None else many(self.weight, self.bias)

    def _gates(self, gate: str | None) -> bool:
        """Whether the launch applies the gate itself."""
        return gate in SILU and (self.weight.part == "both" or not self.weight.tiled)

    def _by_operations(self, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None) -> Tensor:
        if norm is not None:
            x = rmsnorm.rmsnorm(x, norm.weight, norm.eps, norm.plus_one)
        y = self.large_m(x, gate)
        return y if residual is None else residual + y


def normed(norm: FusedNorm, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rmsnorm(s), s) for s = x + added, or s = x without `added`; both [M, K], contiguous."""
    if x.device.type == "cpu":
        if added is None:
            return rmsnorm.rmsnorm(x, norm.weight, norm.eps, norm.plus_one), x
        both: tuple[Tensor, Tensor] = rmsnorm.add_rmsnorm(added, x, norm.weight, norm.eps, norm.plus_one)
        return both
    from accelpatch.kernels.triton import rmsnorm as kernel

    if added is None:
        return kernel.rmsnorm(x, norm.weight, norm.eps, norm.plus_one), x
    return kernel.add_rmsnorm(added, x, norm.weight, norm.eps, norm.plus_one)


def gated(both: Tensor, activation: str) -> Tensor:
    """activation(first half of the columns) * second half."""
    gate, up = both.chunk(2, dim=-1)
    if both.device.type == "cpu":
        y: Tensor = gated_activation.gated_activation(gate, up, activation)
        return y
    from accelpatch.kernels.triton import gated_activation as kernel

    return kernel.gated_activation(gate, up, activation)
