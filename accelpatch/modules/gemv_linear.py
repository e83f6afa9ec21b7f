"""A linear layer that keeps its float weight and reads it at the speed of memory when there are few tokens."""

from __future__ import annotations

from torch import Tensor, nn

from accelpatch.kernels.gemv import gemv


class GemvLinear(nn.Module):
    """y = x @ weight^T + bias, the weight plain as in nn.Linear, shared with the original."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        return gemv(x, self.weight, self.bias)
