"""A linear layer that keeps its float weight and reads it at the speed of memory when there are few tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.gemv import gemv
from accelpatch.modules.autocast import autocast
from accelpatch.modules.replacement import Replacement


class GemvLinear(Replacement):
    """y = x @ weight^T + bias, the weight plain as in nn.Linear, shared with the original."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        x = autocast(x)
        if x.dtype != self.weight.dtype:  # torch casts the weight too
            return functional.linear(x, self.weight, self.bias)
        return gemv(x, self.weight, self.bias)
