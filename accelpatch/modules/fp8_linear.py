"""A linear layer with weight and activations in 8-bit floats."""

from __future__ import annotations

from torch import Tensor

from accelpatch.kernels.ops.linear.w8a8_linear import w8a8_linear
from accelpatch.modules.autocast import autocast
from accelpatch.modules.weight_only import Fp8WeightOnlyLinear


class Fp8Linear(Fp8WeightOnlyLinear):
    """y = x in the weight's form . q^T * scales + bias: one scale a row of the weight, and one a token of x."""

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        assert self.q is not None
        assert self.scale is not None
        return w8a8_linear(autocast(x), self.q, self.scale, None, self.bias)
