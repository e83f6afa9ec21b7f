"""A frozen linear layer and one LoRA adapter that trains, as one node of autograd.

    y[M, N] = x[M, K] @ w^T + bias + s (x @ down[r, K]^T) @ up[N, r]^T        LoRA: https://arxiv.org/abs/2106.09685
    dx = dy @ w + dt @ down    dt = s dy @ up    d_down = dt^T @ x    d_up = s dy^T @ t    t = x @ down^T

PEFT's own forward is nine operations with a node each, of which three read x or y in float32. Here the products are in
x's dtype, as PEFT's are under autocast; their sums, and the adapter's gradients, are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.operation import Operation, is_eager
from accelpatch.kernels.ops.linear.by_layout import trained_as


def low_rank_linear(
    x: Tensor, weight: Layout, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> Tensor:  # fmt: skip
    """y[..., N] in the dtype of x[..., K]. weight: frozen, of a layout for which `why_not` has no reason; bias[N]:
    frozen. down[r, K], up[N, r]: floats of any dtype, which get gradients in it."""
    weight, operation = trained_as(weight)
    y: Tensor = _LowRank.apply(x, down, up, scaling, operation, (*weight.arguments(), bias))
    return y


def why_not(weight: Layout, *tensors: Tensor | None) -> str | None:
    """Why an adapter of a frozen weight cannot be trained here; None where it can. tensors: x, bias and the
    adapter's."""
    if torch.compiler.is_compiling() or not is_eager() or not all(_plain(one) for one in tensors):
        return "a graph is traced, or a tensor is none of torch's own"
    trained, operation = trained_as(weight)
    if operation.input_gradient is None or (trained.order is not None and not trained.orders):
        return "its operation has no gradient of its input alone"
    return None


def _plain(one: Tensor | None) -> bool:
    return one is None or (type(one) in (Tensor, torch.nn.Parameter) and not one.is_meta)


def _scaled(a: Tensor, b: Tensor, by: float) -> Tensor:
    """by * a @ b as one operation: addmm does not read its first argument where beta is 0."""
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=by)


class _LowRank(torch.autograd.Function):
    """The autograd function. arguments: those of the operation after x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float, operation: Operation[Tensor],
        arguments: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        y = operation.function(x, *arguments)
        flat, first, second = x.reshape(-1, x.shape[-1]), down.to(x.dtype), up.to(x.dtype)
        low = flat @ first.t()
        y.view(-1, y.shape[-1]).addmm_(low, second.t(), alpha=scaling)
        tensors = (one for one in arguments if isinstance(one, Tensor))
        ctx.save_for_backward(x, down, up, low, first, second, *tensors)
        ctx.rest = (scaling, operation, [None if isinstance(one, Tensor) else (one,) for one in arguments])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, down, up, low, first, second, *tensors = ctx.saved_tensors
        scaling, operation, rest = ctx.rest
        (dy,), flat = gradients, x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():  # a second derivative goes through what follows from the arguments
            first, second = down.to(x.dtype), up.to(x.dtype)
            low = flat @ first.t()
        given = iter(tensors)
        arguments = tuple(next(given) if one is None else one[0] for one in rest)
        wide = dy.reshape(-1, dy.shape[-1])
        of_low = _scaled(wide, second, scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            made = operation.input_gradient(dy, (None, *arguments)).view(-1, x.shape[-1])
            add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_  # in place: `made` is nobody else's
            dx = add(made, of_low, first).view(x.shape)
        of_first = (of_low.t() @ flat).to(down.dtype) if ctx.needs_input_grad[1] else None
        of_second = _scaled(wide.t(), low, scaling).to(up.dtype) if ctx.needs_input_grad[2] else None
        return dx, of_first, of_second, None, None, None
