"""A linear layer that keeps its float weight and runs memory-bound GEMV kernels for few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.hip.binding import prefetchable
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.linear.float_linear import float_linear
from accelpatch.modules.autocast import autocast
from accelpatch.modules.replacement import Replacement


class GemvLinear(Replacement):
    """y = x @ weight^T + bias, with the plain weight of the nn.Linear, shared with the original.

    The kernel runs only in captured or compiled programs: called eagerly, its launch costs the host more time than
    torch's own, and more than the device saves. kernel: a user's implementation, which runs eagerly too.
    """

    weight: Tensor
    bias: Tensor | None
    kernel = ""

    @property
    def layout(self) -> Plain:
        """The weight as it lies in memory."""
        return Plain(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        if takes_kernel(x, self.weight, self.kernel):
            return float_linear(autocast(x), self.weight, self.bias, self.kernel)
        return functional.linear(x, self.weight, self.bias)


class GemvConv1D(Replacement):
    """The same of a transformers Conv1D: its weight keeps the shape [K, N], and lies in memory as [N, K]."""

    weight: Tensor
    bias: Tensor | None
    kernel = ""

    @property
    def layout(self) -> Plain:
        """The weight as it lies in memory, [N, K]."""
        return Plain(rows_of_(self))

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        if takes_kernel(x, self.weight, self.kernel):
            return float_linear(autocast(x), self.weight.t(), self.bias, self.kernel)
        y: Tensor = super().forward(x)
        return y


def takes_kernel(x: Tensor, weight: Tensor, kernel: str = "") -> bool:
    """Whether the kernel runs this call; under autocast torch would cast the weight too. A user's runs where no
    gradient is asked for: it has none."""
    if kernel and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    if not (kernel or prefetchable() or dispatch.watched() or torch.compiler.is_compiling()):
        return False
    return autocast(x).dtype == weight.dtype


def rows_of_(module: nn.Module) -> Tensor:
    """The weight of a Conv1D as [N, K], contiguous; its parameter, of the same shape and values, becomes a view."""
    weight = module._parameters["weight"]
    assert weight is not None
    if not weight.t().is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    return weight.t()
