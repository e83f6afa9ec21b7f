"""A linear layer that keeps its float weight and runs memory-bound GEMV kernels for few tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.hip.binding import prefetchable
from accelpatch.kernels.ops.gemv import gemv
from accelpatch.modules.autocast import autocast
from accelpatch.modules.replacement import Replacement


class GemvLinear(Replacement):
    """y = x @ weight^T + bias, with the plain weight of the nn.Linear, shared with the original.

    The kernel runs only in captured or compiled programs: called eagerly, its launch costs the host more time than
    torch's own, and more than the device saves.
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
