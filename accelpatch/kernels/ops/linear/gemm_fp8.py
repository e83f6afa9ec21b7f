"""Products of 8-bit floats with the scales, the bias and the gate behind them.

    gemm_fp8    y[M, N] = row_scale[m] column_scale[n] (a . b^T) + bias[n]              a[M, K], b[N, K] e4m3
    gated_fp8   y[M, N / 2] = activation(first half of those columns) * second half, each rounded as by itself

Sums are float32; Hopper's matrix unit keeps 14 bits of what it adds up itself, so that for long K it is emptied into
float32 sums every few products (use_fast_accum=False of torch, FLOAT of the Triton kernels). Both matrices have one
form, e4m3fn or e4m3fnuz, and a GPU takes the one of its table row alone (device.py). Source: OCP 8-bit floating point,
E4M3.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS
from accelpatch.kernels.ops.activation.quantize_rows import form_why_not
from accelpatch.kernels.ops.linear import common
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP, GATED = "gemm_fp8", "gated_fp8"
FAST = 8192  # values of K whose bfloat16 sums may stay in Hopper's matrix unit: 63% of the float rule's bound at 4,096
ALIGNED = 16  # values that N and K of torch._scaled_mm are multiples of


def dense(dtype: torch.dtype, q: Tensor, scale: Tensor) -> Tensor:
    """q[N, K] * scale[N], computed in float32 or wider and rounded to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (q.to(wide) * scale.to(wide)[:, None]).to(dtype)


def reference(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantise both to `dtype`, then torch's own linear layer."""
    float_bias = None if bias is None else bias.to(dtype)
    return functional.linear(dense(dtype, a, row_scale), dense(dtype, b, column_scale), float_bias)


def gated_reference(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The references of the two operations."""
    first, second = reference(a, b, row_scale, column_scale, bias, dtype).chunk(2, dim=-1)
    return gated_activation.reference(first, second, activation)


def spec(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit together."""
    for name, one in (("a", a), ("b", b)):
        require(one.dtype in FP8 and one.dim() == 2, OP, f"{name} is 8-bit floats [rows, K], not {say(one)}")
    (m, k), n = a.shape, b.shape[0]
    require(a.dtype == b.dtype, OP, f"a is {fp8_name(a.dtype)} and b {fp8_name(b.dtype)}: the same bits differ in them")
    require(b.shape[1] == k and k >= 1 and n >= 1, OP, f"a is {list(a.shape)} and b {list(b.shape)}: K must be equal")
    require(dtype in FLOATS, OP, f"y is float, not {dtype}")
    for name, vector, size in (("row_scale", row_scale, m), ("column_scale", column_scale, n), ("bias", bias, n)):
        if vector is not None:
            fits = vector.dtype in FLOATS and vector.shape == (size,)
            require(fits, OP, f"{name} is float [{size}], not {say(vector)}")
    others = {"b": b, "row_scale": row_scale, "column_scale": column_scale, "bias": bias}
    for name, tensor in others.items():
        if tensor is not None:
            require(tensor.device == a.device, OP, f"a lies on {a.device}, {name} on {tensor.device}: move one")
    return of_shape(m, n, k, dtype, a.dtype, bias=None if bias is None else bias.dtype)


def gated_spec(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Spec:  # fmt: skip
    """As `spec`."""
    require(activation in ACTIVATIONS, GATED, f"there is no activation {activation!r}")
    found = spec(a, b, row_scale, column_scale, bias, dtype)
    n = found.sizes["N"]
    require(n % 2 == 0, GATED, f"N = {n} columns have no halves")
    return Spec(GATED, found.sizes, dtype, options={**found.options, "activation": activation})


def of_shape(
    m: int, n: int, k: int, dtype: torch.dtype, form: torch.dtype = FP8[0], *, bias: torch.dtype | None = None
) -> Spec:
    """The Spec of products of this size, for planning. bias: its dtype, None for none."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, options={"form": fp8_name(form), "bias": bias})


def torch_why_not(spec: Spec, device: Device) -> str | None:
    """Why plain torch does not run a spec: a weight in a form that is not the GPU's own is to be converted first."""
    return None if device.fp8 is None else form_why_not(spec, device)


def by_torch(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The implementation `torch`, some rows of b at a time: in float32, on a CPU in float64, whose sums are exact."""
    (m, k), n, cpu = a.shape, b.shape[0], a.device.type == "cpu"
    x, wide = _floats(a), torch.float64 if cpu else torch.float32
    rows, columns, y = row_scale.to(wide)[:, None], column_scale.to(wide), a.new_empty((m, n), dtype=dtype)
    step = max(1, (common.CPU_BLOCK if cpu else common.DEVICE_BLOCK) // k)
    for start in range(0, n, step):
        some = slice(start, start + step)
        part = x @ _floats(b[some]).t() * (rows * columns[some])
        y[:, some] = part if bias is None else part + bias[some]
    return y


def _floats(q: Tensor) -> Tensor:
    """Codes as float32, on a CPU as float64, where torch's own conversion takes three times as long."""
    return q.to(torch.float32) if q.device.type != "cpu" else _values(q.dtype)[q.view(torch.uint8).to(torch.int32)]


@functools.cache
def _values(form: torch.dtype) -> Tensor:
    """The number of each of the 256 codes."""
    return torch.arange(256, dtype=torch.uint8).view(form).to(torch.float64)


def scaled_mm_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_scaled_mm` cannot run a spec; None where it can."""
    m, n, k = (spec.sizes[name] for name in "MNK")
    if device.kind != "cuda":
        return "torch._scaled_mm has scales of rows on GPUs alone"
    if reason := form_why_not(spec, device):
        return reason
    if spec.dtype != torch.bfloat16 or spec.options.get("bias") not in (None, torch.bfloat16):
        return "torch._scaled_mm with scales of rows gives bfloat16, and takes a bias of it"
    if m == 0 or n % ALIGNED or k % ALIGNED:
        return f"torch._scaled_mm takes rows, and N and K that are multiples of {ALIGNED}, not {m}, {n}, {k}"
    return None


def by_scaled_mm(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The implementation `scaled_mm`: cuBLASLt, hipBLASLt or CUTLASS, as torch chooses."""
    rows, columns = row_scale.float().contiguous()[:, None], column_scale.float().contiguous()[None]
    bias = None if bias is None else bias.contiguous()
    y: Tensor = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), rows, columns, bias, out_dtype=dtype, use_fast_accum=a.shape[1] <= FAST
    )
    return y


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    m, n = spec.sizes["M"], spec.sizes["N"]
    if max(m, n) >= 1 << 30 or m * n >= 1 << 31:
        return f"M = {m} and N = {n} are more than its 32-bit indices reach"
    return launch.why_not(device, spec.dtype) or form_why_not(spec, device)


def by_triton(*args: Any) -> Tensor:
    """The implementation `triton`: tiles, or for few rows a stream of the weight."""
    from accelpatch.kernels.triton.gemm_w8a8 import gemm_fp8 as run

    return run(*args)


def gated_by_triton(*args: Any) -> Tensor:
    """The implementation `triton` of the product with its gate: one launch."""
    from accelpatch.kernels.triton.gemm_w8a8 import gated as run

    return run(*args)


def gated_by_scaled_mm(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The implementation `scaled_mm` of the product with its gate, which torch does not have: it is chosen."""
    first, second = by_scaled_mm(a, b, row_scale, column_scale, bias, dtype).chunk(2, dim=-1)
    with dispatch.forced("operations") if dispatch.watched() else nullcontext():
        return gated_activation.gated_activation.function(first, second, activation)


def gated_by_operations(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The implementation `operations`: the product, then the gate."""
    both: Tensor = gemm_fp8.function(a, b, row_scale, column_scale, bias, dtype)
    first, second = both.chunk(2, dim=-1)
    return gated_activation.gated_activation.function(first, second, activation)


@operation(OP)
def gemm_fp8(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """y[M, N] of `dtype`, contiguous: a[M, K] times b[N, K], both of one form, with their scales, plus bias[N].

    row_scale[M], column_scale[N] float. Raises KernelError for arguments that do not fit.
    """
    y: Tensor = dispatch.run(OP, spec, a.device, (a, b, row_scale, column_scale, bias, dtype))
    return y


@gemm_fp8.register_fake
def _fake(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    spec(a, b, row_scale, column_scale, bias, dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@operation(GATED)
def gated_fp8(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """activation(first half of the columns of `gemm_fp8`) * second half: y[M, N / 2], contiguous."""
    args = (a, b, row_scale, column_scale, bias, activation, dtype)
    y: Tensor = dispatch.run(GATED, gated_spec, a.device, args)
    return y


@gated_fp8.register_fake
def _gated_fake(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    gated_spec(a, b, row_scale, column_scale, bias, activation, dtype)
    return a.new_empty((a.shape[0], b.shape[0] // 2), dtype=dtype)


def cases(gate: str | None = None) -> list[Case]:
    """Cases for parity checks: odd sizes, both forms, few rows and many."""

    def case(m: int, n: int, k: int, bias: bool, form: torch.dtype) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, column, bias_values = common.operands(generator, dtype, device, m, n, k, 1, bias)
            a, b = (80 * x.float()).clamp(-240, 240), 80 * torch.randn(n, k, generator=generator).clamp(-3, 3)
            row = (torch.rand(m, generator=generator) + 0.5).to(device) / 80
            arguments = (a.to(form), b.to(device, form), row, column[:, 0] / 80, bias_values)
            return (*arguments, dtype) if gate is None else (*arguments, gate, dtype)

        return Case(f"m{m}-n{n}-k{k}-{fp8_name(form)}{'-bias' if bias else ''}", make)

    given = (*common.SIZES, (65, 48, 272, 1, True))
    sizes = [(m, n + n % 2 * (gate is not None), k, bias) for m, n, k, _, bias in given]
    return [case(*size, FP8[at % 2]) for at, size in enumerate(sizes)]


KERNELS = {
    OP: Kernel(
        gemm_fp8,
        reference,
        spec,
        {
            "scaled_mm": Implementation(by_scaled_mm, scaled_mm_why_not),
            "triton": Implementation(by_triton, triton_why_not),
            "torch": Implementation(by_torch, torch_why_not),
        },
        cases,
    ),
    GATED: Kernel(
        gated_fp8,
        gated_reference,
        gated_spec,
        {
            "scaled_mm": Implementation(gated_by_scaled_mm, scaled_mm_why_not),
            "triton": Implementation(gated_by_triton, triton_why_not),
            "operations": Implementation(gated_by_operations, torch_why_not),
        },
        lambda: cases("silu"),
        composed=True,
    ),
}
