"""A product with what stands before and after it, for steps that hold its weight ready: all in one launch on a GPU.

    y[M, N] = gate(rmsnorm(x[M, K]) @ w[N, K]^T + bias[N]) + residual[M, N]

The norm, the gate (an activation of the first half of the columns times the second half) and the residual are
optional. w is plain, int8 with a scale a row, or 4-bit tiles. A gate is a launch of its own where it is not silu, or
where 4-bit tiles are not paired. On a CPU the single operations run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import gated_activation, gemv, int4_tiles, int8_linear, rmsnorm, tiled_int4_linear
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Weight
from accelpatch.kernels.int4_tiles import Tiles

SILU = ("silu", "swish")


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm with weight[K] in the activations' dtype, counted from 0, or from 1 and rounded once (`plus_one`)."""

    weight: Tensor
    eps: float
    plus_one: bool = False

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x)."""
        return rmsnorm.rmsnorm_add(x, residual, self.weight, self.eps, self.plus_one)


@dataclass(frozen=True, eq=False)
class Product:
    """w: a float weight[N, K], int8[N, K] with scale[N, 1] float32, or 4-bit tiles. bias[N] in the dtype of x."""

    w: Tensor | Tiles
    scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return self.w.n if isinstance(self.w, Tiles) else int(self.w.shape[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return self.w.k if isinstance(self.w, Tiles) else int(self.w.shape[1])

    def why_not(self, dtype: torch.dtype, device: Device) -> str | None:
        """Why `__call__` cannot run for x of `dtype`; None where it can."""
        if device.kind == "cpu":
            return None
        return binding.why_not(gemv.of_shape(self.n, self.k, dtype), device)

    def __call__(
        self, x: Tensor, norm: Norm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """y in x's dtype; x[M, K] contiguous, M up to `binding.MOST`. gate: the name of an activation."""
        if x.device.type == "cpu":
            return self._by_operations(x, norm, gate, residual)
        part = self.w.part if isinstance(self.w, Tiles) else "all"
        one = gate in SILU and (part == "both" or not isinstance(self.w, Tiles))
        mixed = part != "all" and not one  # the columns have to be put in order
        inside = not mixed and (gate is None or one)
        bias = tiled_int4_linear.in_tiles(self.bias, self.w) if mixed and isinstance(self.w, Tiles) else self.bias
        y = binding.launch(
            self._weight(), x, bias=bias, residual=residual if inside else None,
            activation="silu_gate" if one else "none",
            norm="none" if norm is None else "rms_plus_one" if norm.plus_one else "rms",
            norm_weight=None if norm is None else norm.weight, epsilon=0.0 if norm is None else norm.eps,
        )  # fmt: skip
        y = int4_tiles.in_order(y, part) if mixed else y
        if gate is not None and not one:
            y = gated_activation.gated_activation(*y.chunk(2, dim=-1), gate)
        return y if residual is None or inside else residual + y

    def _weight(self) -> Weight:
        if not isinstance(self.w, Tiles):
            form = None if self.scale is None else 0
            return Weight("gemv" if form is None else "gemv_int8", self.n, self.k, self.w, form, self.scale)
        w, scale, offset, _, k, group, kind, _ = self.w
        form = int4_tiles.WHOLE_ROW if group == k else group
        return Weight(
            "gemv_int4", self.w.rows, k, w, form, scale, offset, kind, int4_tiles.places(k, group)["group_shift"]
        )

    def _by_operations(self, x: Tensor, norm: Norm | None, gate: str | None, residual: Tensor | None) -> Tensor:
        if norm is not None:
            x = rmsnorm.rmsnorm(x, norm.weight, norm.eps, norm.plus_one)
        if isinstance(self.w, Tiles):
            y: Tensor = tiled_int4_linear.tiled_int4_linear(x, *self.w, self.bias)
        elif self.scale is not None:
            y = int8_linear.int8_linear(x, self.w, self.scale, self.bias)
        else:
            y = gemv.gemv(x, self.w, self.bias)
        if gate is not None:
            y = gated_activation.gated_activation(*y.chunk(2, dim=-1), gate)
        return y if residual is None else residual + y
