"""Linear layer with an int8 weight: y[M, N] = x[M, K] @ (q[N, K] * scale[N, G])^T + bias[N].

G = 1 is one scale per output channel; else each group of K / G values along K has one. Symmetric: no offset. x may have
any leading dimensions and strides; y has its dtype. Activations stay float (weight-only quantisation).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.row_major import Int8Rows
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient, wgmma
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch


def dense(dtype: torch.dtype, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], computed in float32 or wider and rounded to `dtype`, and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    weight = q.to(wide)
    weight.unflatten(1, (scale.shape[1], -1)).mul_(scale.to(wide)[:, :, None])
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, q, scale, bias))


def blocks(*weight: Tensor | None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    return common.float64_blocks(dense, *weight)


def spec(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    return common.spec("int8_linear", x, q, 8, scale, None, bias)


def by_torch(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        groups = q[start:stop].to(dtype).unflatten(1, (scale.shape[1], -1))
        return groups.mul_(scale[start:stop].to(dtype).unsqueeze(2)).flatten(1)

    return common.by_row_blocks(x, q.shape[0], q.shape[1], rows, bias)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    if spec.group_size != spec.sizes["K"]:
        return f"it takes one scale a row (group_size null), not groups of {spec.group_size}"
    return binding.why_not(spec, device, "gemv_int8", "rows") or common.too_many_rows(spec, binding.MAX_ROWS)


def libraries(spec: Spec, device: Device) -> tuple[str, ...]:
    """The device libraries of such a weight on a device."""
    return (binding.library_name("gemv_int8", spec.dtype, "rows"),)


def by_hip(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x."""
    return binding.launch(Int8Rows(q, scale).launch(), x, bias=bias)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    dtypes = (spec.dtype,) if spec.scale_dtype is None else (spec.dtype, spec.scale_dtype)
    return common.too_large(spec) or launch.why_not(device, *dtypes)


def by_triton(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `triton`: dequantises in registers, or for many rows into slices for torch's GEMM."""
    from accelpatch.kernels.triton.weight_only import int8_linear as run

    return run(x, q, scale, bias)


@operation("int8_linear")
def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[..., N] = x[..., K] @ (q * scale)^T + bias.

    x[..., K] float; q[N, K] int8; scale[N, G] float, G dividing K; bias[N] float or None. y has x's dtype, contiguous.
    Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run("int8_linear", spec, x.device, (x, q, scale, bias))
    return y


int8_linear.register_fake(common.rows_like(spec))


def _rows(weight: Int8Rows) -> gradient.Rows:
    if launch.why_not(probe(weight.w.device)) is None:
        from accelpatch.kernels.triton.weight_only import int8_rows_of

        return int8_rows_of(*weight.arguments())
    return gradient.of_rows(weight, dense)


gradient.differentiate(int8_linear, Int8Rows, _rows)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes."""

    def case(m: int, n: int, k: int, groups: int, bias: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
            x, scale, b = common.operands(generator, dtype, device, m, n, k, groups, bias)
            q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
            return x, q, scale / 127, b

        return Case(f"m{m}-n{n}-k{k}-g{k // groups}{'-bias' if bias else ''}", make)

    return [case(*size) for size in common.SIZES]


IMPLEMENTATIONS = {
    "hip": Implementation(by_hip, why_not),
    "triton_wgmma": Implementation(wgmma.by_int8, wgmma.int8_why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {"int8_linear": Kernel(int8_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
