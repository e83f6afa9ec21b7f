"""A linear layer that keeps its float weight and reads it at the speed of memory when there are few tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.gemv import gemv
from accelpatch.kernels.hip.binding import prefetchable
from accelpatch.modules.autocast import autocast
from accelpatch.modules.replacement import Replacement


class GemvLinear(Replacement):
    """y = x @ weight^T + bias, the weight plain as in nn.Linear, shared with the original.

    The kernel runs where its launch costs nothing: in captured programs, and in compiled ones. Called one by one a
    product takes the host longer to launch than torch's own, by more than the device is faster.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        if prefetchable() or dispatch.watched() or torch.compiler.is_compiling():
            x = autocast(x)
            if x.dtype == self.weight.dtype:  # torch casts the weight too
                return gemv(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)
