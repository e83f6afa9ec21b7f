"""Linear layer with weight and activations in 8 bits: y[M, N] = (xq[M, K] . q[N, K]) * xs[M] * scale[N] + bias[N].

xq and xs are x in the form of q with a scale a row, or in int8 with the one static scale (quantize_rows.py); its codes
are the same at every number of rows and in every implementation.

    int8        products summed as int32, exactly, and y = round(fma(xs * scale, sum, bias)) in float32
    e4m3fn, e4m3fnuz    summed as float32 (gemm_fp8.py)

Source: Xiao et al. 2022, arXiv:2211.10438; OCP 8-bit floating point, E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.row_major import FP8, form_name, fp8_name
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows, function_of
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.linear import common, gemm_fp8, gemm_w8a8
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "w8a8_linear"
LONGEST = 133152  # K up to which 127 * 127 * K is an int32


def reference(
    x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The references of the two operations; x's dtype is the precision of all but the codes."""
    given = None if input_scale is None else input_scale.float()
    xq, xs = rows.reference(x, given, q.dtype)
    if q.dtype in FP8:
        flat = gemm_fp8.reference(xq.reshape(-1, xq.shape[-1]), q, xs.reshape(-1), scale.flatten(), bias, x.dtype)
        return flat.view(*x.shape[:-1], q.shape[0])
    y = gemm_w8a8.accumulators(xq.reshape(-1, xq.shape[-1]), q).view(*x.shape[:-1], q.shape[0]).to(x.dtype)
    y = y * (xs * scale.float().flatten()).to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


def spec(x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    found = common.spec(OP, x, q, 8, scale, None, bias, (torch.int8, *FP8))
    m, n, k = (found.sizes[name] for name in "MNK")
    require(found.group_size == k, OP, f"scale is [N, 1], one a row, not {list(scale.shape)}")
    if q.dtype == torch.int8:
        require(k <= LONGEST, OP, f"K = {k}: sums of more than {LONGEST} overflow an int32")
    else:
        require(input_scale is None, OP, "a static scale is for int8 activations")
    rows.spec(x, input_scale)
    return of_shape(n, k, x.dtype, m=m, form=q.dtype)


def of_shape(n: int, k: int, dtype: torch.dtype, *, m: int = 1, form: torch.dtype = torch.int8) -> Spec:
    """The Spec of a linear layer of this size, for planning before there is a weight. form: of the weight and the
    activations."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, torch.float32, k, options={"form": form_name(form)})


def form_of(spec: Spec) -> torch.dtype:
    """The form of a spec's weight; int8 where the spec does not say."""
    name = spec.options.get("form", "int8")
    return next((form for form in FP8 if fp8_name(form) == name), torch.int8)


def by_operations(
    x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The implementation `operations`: the rows in 8 bits, then the product."""
    xq, xs = rows.quantize_rows.function(x, input_scale, q.dtype)
    flat = xq.view(-1, xq.shape[-1])
    return _scaled_gemm(flat, q, xs.view(-1), scale.view(-1), bias, x.dtype).view(*x.shape[:-1], q.shape[0])


def _scaled_gemm(xq: Tensor, q: Tensor, xs: Tensor, ws: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if q.dtype == torch.int8:
        return gemm_w8a8.gemm_w8a8.function(xq, q, 1.0, xs, ws, bias, 1.0, None, "none", None, dtype)
    return gemm_fp8.gemm_fp8.function(xq, q, xs, ws, bias, dtype)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why the rows and their products cannot run by Triton; None where they can."""
    sizes, form = (spec.sizes["M"], spec.sizes["N"], spec.sizes["K"]), form_of(spec)
    if reason := rows.triton_why_not(rows.of_shape(sizes[2], spec.dtype, form=form), device):
        return reason
    if form == torch.int8:
        return gemm_w8a8.triton_why_not(gemm_w8a8.of_shape(*sizes, spec.dtype), device)
    return gemm_fp8.triton_why_not(gemm_fp8.of_shape(*sizes, spec.dtype, form), device)


def of_rows(x: rows.QuantizedRows, q: Tensor, scale: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
    """y[M, N] of activations that are in 8 bits already; with a gate, gate(first half of the columns) * second half.

    Many rows on a GPU have the gate in the product's launch.
    """
    xs, ws = x.scale.expand(len(x.q), 1).reshape(-1), scale.view(-1)
    if gate is not None and q.dtype in FP8:
        return gemm_fp8.gated_fp8.function(x.q, q, xs, ws, bias, gate, x.dtype)
    m, (n, k) = len(x.q), q.shape
    if gate is not None and m > choice.STREAMED and not triton_why_not(of_shape(n, k, x.dtype, m=m), probe(q.device)):
        from accelpatch.kernels.triton.gemm_w8a8 import gated as run

        return run(x.q, q, xs, ws, bias, gate, x.dtype)
    y = _scaled_gemm(x.q, q, xs, ws, bias, x.dtype)
    if gate is None:
        return y
    first, second = y.chunk(2, dim=-1)
    return gated_activation.gated_activation.function(first, second, gate)


def gated_many(x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """silu(first half of the columns of y) * second half."""
    xq, xs = rows.quantize_rows.function(x, input_scale, q.dtype)
    return of_rows(rows.QuantizedRows(xq, xs, x.dtype), q, scale, bias, "silu")


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    reason = rows.form_why_not(spec, device) or binding.why_not(spec, device, *function_of(form_of(spec)))
    return reason or common.too_many_rows(spec, binding.MAX_ROWS)


def libraries(spec: Spec, device: Device) -> tuple[str, ...]:
    """The device libraries of such a weight on a device."""
    function, variant = function_of(form_of(spec))
    return (binding.library_name(function, spec.dtype, variant),)


def by_hip(
    x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x, which it quantises inside."""
    return binding.launch(W8A8Rows(q, scale, input_scale).launch(), x, bias=bias)


@operation(OP)
def w8a8_linear(
    x: Tensor, q: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """y[..., N] in x's dtype, contiguous: x[..., K] in the form of q, times q[N, K] with scale[N, 1], plus bias[N].

    q: int8, float8_e4m3fn or float8_e4m3fnuz. input_scale: the static scale of x in int8, one float32; None: a scale a
    row. Raises KernelError for arguments that do not
    fit.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, q, scale, input_scale, bias))
    return y


w8a8_linear.register_fake(common.rows_like(spec))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, both kinds of scales, every form."""

    def case(m: int, n: int, k: int, bias: bool, static: bool, form: torch.dtype = torch.int8) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
            x, scale, b = common.operands(generator, dtype, device, m, n, k, 1, bias)
            q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(device).to(form)
            return x, q, scale / 127, torch.tensor([0.03], device=device) if static else None, b

        name = "" if form == torch.int8 else f"-{form_name(form)}"
        return Case(f"m{m}-n{n}-k{k}-{'static' if static else 'dynamic'}{'-bias' if bias else ''}{name}", make)

    sizes = [(m, n, k, bias) for m, n, k, _, bias in common.SIZES]
    integers = [case(*size, at % 2 == 1) for at, size in enumerate(sizes)]
    return integers + [case(*size, False, FP8[at % 2]) for at, size in enumerate(sizes)]


IMPLEMENTATIONS = {
    "hip": Implementation(by_hip, why_not),
    "triton": Implementation(by_operations, triton_why_not),
    "operations": Implementation(by_operations, gemm_fp8.torch_why_not),
}
KERNELS = {OP: Kernel(w8a8_linear, reference, spec, IMPLEMENTATIONS, cases, composed=True)}
