"""Linear layer with int8 weight and int8 activations over a weight in the CPU's layout (w8a8_pack.py).

    y[M, N] = fma(xs[M] * scale[N], float(xq[M, K] . q[N, K]), bias[N])

xq and xs are x in int8 with a scale a row, or the one static scale (quantize_rows.py); the products are summed as
int32, exactly. The values are those of w8a8_linear: the reference unpacks the weight and runs its reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require, say
from accelpatch.kernels.cpu import linear as cpu_linear
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.linear import gemm_w8a8, w8a8_linear
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "w8a8_packed"
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def reference(
    x: Tensor, data: Tensor, n: int, k: int, input_scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Unpack the weight, then the reference of w8a8_linear."""
    pack = W8A8Pack.of_w8a8_arguments(data, n, k, input_scale, None)
    q, scale, _ = pack.unpack()
    return w8a8_linear.reference(x, q, scale, pack.static_scale, bias)


def spec(x: Tensor, data: Tensor, n: int, k: int, input_scale: float | None = None, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where x does not fit the pack."""
    pack = W8A8Pack.of_w8a8_arguments(data, n, k, input_scale, bias)
    require(x.dim() >= 1 and x.shape[-1] == k, OP, f"x is [..., {k}], not {say(x)}")
    require(data.nbytes == pack.due, OP, f"the pack has {data.nbytes} bytes, this shape {pack.due}: pack it anew")
    require(x.is_floating_point() and x.device == data.device, OP, f"x is float on the CPU, not {say(x)}")
    require(bias is None or bias.shape == (n,), OP, f"bias is [{n}]")
    return of_shape(n, k, x.dtype, m=x.numel() // k)


def of_shape(n: int, k: int, dtype: torch.dtype, *, m: int = 1) -> Spec:
    """The Spec of a pack of this size, for planning before there is one."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, torch.float32, k)


def _why_not(spec: Spec, device: Device) -> str | None:
    if spec.dtype not in NARROW:
        return f"it computes in float32 and narrower, not in {spec.dtype}"
    return W8A8Pack.why_not_w8a8(spec.sizes["N"], spec.sizes["K"]) or native_library.why_not(device)


def _cpu(
    x: Tensor, data: Tensor, n: int, k: int, input_scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    return cpu_linear.linear(x, W8A8Pack.of_w8a8_arguments(data, n, k, input_scale, bias))


def _torch(
    x: Tensor, data: Tensor, n: int, k: int, input_scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Unpack the weight, then the rows and their products in plain torch."""
    pack = W8A8Pack.of_w8a8_arguments(data, n, k, input_scale, None)
    q, scale, _ = pack.unpack()
    xq, row_scales = rows.reference(x, pack.static_scale)
    scales_of_rows = row_scales.expand(*x.shape[:-1], 1).reshape(-1)
    y = gemm_w8a8.by_torch(
        xq.reshape(-1, k), q, 1.0, scales_of_rows, scale.view(-1), bias, 1.0, None, "none", None, x.dtype
    )
    return y.view(*x.shape[:-1], n)


def _torch_why_not(spec: Spec, device: Device) -> str | None:
    return None if device.kind == "cpu" else f"a pack is the CPU's layout, and this is {device.name}"


@operation(OP)
def w8a8_packed(
    x: Tensor, data: Tensor, n: int, k: int, input_scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """y[..., N] in x's dtype, contiguous: x[..., K] as int8, times the weight of a W8A8Pack, plus bias[N].

    Between x and bias lie the `arguments` of the pack. Raises KernelError for an x that does not fit, and where the
    native library is not available.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, data, n, k, input_scale, bias))
    return y


w8a8_packed.register_fake(lambda x, data, n, *rest: x.new_empty((*x.shape[:-1], n)))


def cases() -> list[Case]:
    """The cases of w8a8_linear, as packs."""

    def packed(make: Any) -> Any:
        def made(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, q, scale, static, bias = make(generator, dtype, device)
            return x, *W8A8Pack.pack(q, scale, static).arguments(), bias

        return made

    return [Case(case.id, packed(case.make)) for case in w8a8_linear.cases()]


IMPLEMENTATIONS = {
    "cpu": Implementation(_cpu, _why_not),
    "torch": Implementation(_torch, _torch_why_not),
}
KERNELS = {OP: Kernel(w8a8_packed, reference, spec, IMPLEMENTATIONS, cases)}
