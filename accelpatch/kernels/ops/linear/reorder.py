"""Activations in the order of a weight's columns, for weights whose inputs are sorted by their groups (GPTQ's
act-order): y[M, K] = norm(x)[:, order], where norm is an RMSNorm or nothing.

The norm is that of rmsnorm.py, rounded as there. Source: Frantar et al. 2022, arXiv:2210.17323 (act-order).
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "reorder"


def reference(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """The norm's reference, then torch's indexing."""
    normal = x if weight is None else rmsnorm.reference(x, weight, eps, plus_one)
    return normal[:, order.long()].contiguous()


def spec(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(x.dim() == 2 and x.dtype in FLOATS, OP, f"x is float [M, K], not {x.dtype} {list(x.shape)}")
    m, k = x.shape
    fits = order.dtype == torch.int32 and order.shape == (k,) and order.device == x.device
    require(fits, OP, f"order is int32 [{k}] on {x.device}, not {order.dtype} {list(order.shape)} on {order.device}")
    if weight is not None:
        fits = weight.dtype == x.dtype and weight.shape == (k,) and weight.device == x.device
        require(fits, OP, f"weight is {x.dtype} [{k}] on {x.device}, not {weight.dtype} {list(weight.shape)}")
    return Spec(OP, {"M": m, "K": k}, x.dtype)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if spec.sizes["K"] > rmsnorm.LONGEST:
        return f"the Triton kernel holds rows of up to {rmsnorm.LONGEST} elements"
    return launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.reorder import reorder as run

    return run(x, order, weight, eps, plus_one)


def by_operations(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """The implementation `operations`: the norm, then torch's selection."""
    return (x if weight is None else rmsnorm.rmsnorm.function(x, weight, eps, plus_one)).index_select(1, order)


@operation(OP)
def reorder(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """y[M, K] in x's dtype, contiguous: column j is column order[j] of x, or of its RMSNorm with weight[K].

    order: int32[K]. plus_one: the norm multiplies by 1 + weight. Raises KernelError for arguments that do not fit.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, order, weight, eps, plus_one))
    return y


@reorder.register_fake
def _fake(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    spec(x, order, weight, eps, plus_one)
    return x.new_empty(x.shape)


def cases() -> list[Case]:
    """Cases for parity checks: both kinds of norm and none."""

    def case(m: int, k: int, norm: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            order = torch.randperm(k, generator=generator).to(device, torch.int32)
            weight = torch.randn(k, generator=generator).to(device, dtype)
            return x, order, None if norm == "none" else weight, 1e-6, norm == "plus-one"

        return Case(f"m{m}-k{k}-{norm}", make)

    return [case(1, 576, "none"), case(7, 130, "rms"), case(0, 66, "rms"), case(129, 1537, "plus-one")]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "operations": Implementation(by_operations, dispatch.anywhere),
}
KERNELS = {OP: Kernel(reorder, reference, spec, IMPLEMENTATIONS, cases, composed=True)}
