"""The norm of a fused layer: RMSNorm in its two forms, or LayerNorm.

    RMSNorm     y = x / sqrt(mean(x^2) + eps) * weight                      rmsnorm.py
    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      x[..., K], weight[K], bias[K] or none

Few rows have it inside the linear layer that follows (fused_linear.py). LayerNorm by itself is torch's, which computes
in float32 and rounds once, as the kernels do (layernorm.py: with a residual, and with rows in 8 bits). Source: Ba et
al. 2016, arXiv:1607.06450.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.ops.activation.quantize_rows import QuantizedRows
from accelpatch.kernels.ops.linear.reorder import reorder
from accelpatch.kernels.ops.norm import layernorm, rmsnorm, rmsnorm_rows
from accelpatch.kernels.spec import Described


@dataclass(frozen=True, eq=False)
class FusedNorm(Described):
    """A norm with weight[K] in the activations' dtype; plus_one: multiply by 1 + weight and round once.

    layer: it is a LayerNorm, with bias[K] or without.
    """

    weight: Tensor
    eps: float
    plus_one: bool = False
    layer: bool = False
    bias: Tensor | None = None

    @property
    def facts(self) -> Hashable:
        """Its kind."""
        return self.kind

    @property
    def kind(self) -> str:
        """Its name among the norms of the device library."""
        return "layer" if self.layer else "rms_plus_one" if self.plus_one else "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """norm(x[..., K])."""
        return self._layer_norm(x) if self.layer else rmsnorm.rmsnorm(x, self.weight, self.eps, self.plus_one)

    def reference(self, x: Tensor) -> Tensor:
        """norm(x[..., K]) in plain torch."""
        if self.layer:
            return layernorm.reference(x, self.weight, self.bias, self.eps)
        return rmsnorm.reference(x, self.weight, self.eps, self.plus_one)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x)."""
        if self.layer:
            return residual + self._layer_norm(x)
        return rmsnorm.rmsnorm_add(x, residual, self.weight, self.eps, self.plus_one)

    def of_sum(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(s), s) for s = x + added, or s = x without `added`; both [M, K], contiguous.

        It bypasses torch's dispatcher, which saves host time.
        """
        if self.layer:
            if added is None:
                return self._layer_norm(x), x
            return layernorm.add_layernorm.function(added, x, self.weight, self.bias, self.eps)
        if added is None:
            return rmsnorm.rmsnorm.function(x, self.weight, self.eps, self.plus_one), x
        return rmsnorm.add_rmsnorm.function(added, x, self.weight, self.eps, self.plus_one)

    def rows_of_sum(
        self, x: Tensor, added: Tensor | None, scale: Tensor | None, form: torch.dtype, normed: bool = False
    ) -> tuple[QuantizedRows, Tensor]:
        """(norm(s) in 8 bits, s) for s = x + added, or s = x without `added`. scale: a static one, or None. form: a key
        of `quantize_rows.LARGEST`. normed: the second result is norm(s) as floats in place of s; LayerNorms alone have
        it."""
        if self.layer:
            args = (x, added, self.weight, self.bias, self.eps, scale, form, normed)
            q, scales, total = layernorm.layernorm_rows.function(*args)
        else:
            rows = rmsnorm_rows.rmsnorm_rows.function
            q, scales, total = rows(x, added, self.weight, self.eps, self.plus_one, scale, form)
        return QuantizedRows(q, scales, x.dtype), total

    def _layer_norm(self, x: Tensor) -> Tensor:
        return layernorm.layernorm(x, self.weight, self.bias, self.eps)


def reordered(x: Tensor, order: Tensor, norm: FusedNorm | None) -> Tensor:
    """norm(x)[M, order], x[M, K]; an RMSNorm in the same launch."""
    if norm is None or norm.layer:
        return reorder.function(x if norm is None else norm(x), order, None, 0.0, False)
    return reorder.function(x, order, norm.weight, norm.eps, norm.plus_one)
