"""Linear layer with an 8-bit float weight: y[M, N] = x[M, K] @ (q[N, K] * scale[N, 1])^T + bias[N].

q is torch.float8_e4m3fn, or float8_e4m3fnuz for the matrix units of gfx942 (largest number 240 in place of 448). One
scale per row; or, of weights in blocks of 128 x 128 (DeepSeek-V3), scale[N, ceil(K / 128)], one for each row and 128
values of K, the last of which may be fewer. Activations stay float (weight-only). Format: OCP 8-bit floating point.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, HALVES, require, say
from accelpatch.kernels.compiling.gpu_libraries import FP8_BLOCKS
from accelpatch.kernels.cpu import stored
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.row_major import FP8, FP8_BLOCK, Fp8Rows, fp8_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient, wgmma
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch


def dense(dtype: torch.dtype, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], computed in float32 or wider and rounded to `dtype`, and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    groups = torch.arange(q.shape[1], device=q.device).div_(FP8_BLOCK, rounding_mode="floor")
    values = q.to(wide) * scale.to(wide)[:, groups.clamp_(max=scale.shape[1] - 1)]
    return values.to(dtype), None if bias is None else bias.to(dtype)


def along(scale: Tensor, k: int) -> Tensor:
    """scale[N, G] as what multiplies q[N, k]: [N, 1], or [N, k] of blocks."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(FP8_BLOCK, 1)[:, :k]


def reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, q, scale, bias))


def blocks(*weight: Tensor | None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    return common.float64_blocks(dense, *weight)


def spec(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op = "fp8_linear"
    require(q.dtype in FP8 and q.dim() == 2, op, f"q is float8_e4m3fn or float8_e4m3fnuz [N, K], not {say(q)}")
    n, k = q.shape
    require(x.dim() >= 1 and x.dtype in FLOATS, op, f"x is float [..., K], not {say(x)}")
    require(n >= 1 and k >= 1, op, f"the weight is empty: N = {n}, K = {k}")
    require(x.shape[-1] == k, op, f"x has {x.shape[-1]} features, the weight {k}")
    blocks = -(-k // FP8_BLOCK)
    fits = scale.dim() == 2 and scale.shape[0] == n and scale.dtype in FLOATS and scale.shape[1] in (1, blocks)
    require(fits, op, f"scale is float [{n}, 1], or [{n}, {blocks}] of blocks, not {say(scale)}")
    require(scale.shape[1] == 1 or q.dtype == FP8[0], op, "blocks are of e4m3fn")
    common.check_bias(op, x, n, bias, q=q, scale=scale)
    return of_shape(n, k, x.dtype, q.dtype, m=x.numel() // k, blocks=scale.shape[1] > 1)


def of_shape(
    n: int, k: int, dtype: torch.dtype, form: torch.dtype = torch.float8_e4m3fn, *, m: int = 1, blocks: bool = False
) -> Spec:
    """The Spec of a linear layer of this size, for planning before there is a weight. form: the weight's dtype.
    blocks: whether a row has several scales."""
    sizes, options = {"M": m, "N": n, "K": k}, {"form": FP8_BLOCKS if blocks else fp8_name(form)}
    return Spec("fp8_linear", sizes, dtype, torch.float32, FP8_BLOCK if blocks else k, options=options)


def form_of(spec: Spec) -> str:
    """The variant of the device library for the weight; e4m3fn where the spec does not say."""
    return str(spec.options.get("form", fp8_name(FP8[0])))


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    return binding.why_not(spec, device, "gemv_fp8", form_of(spec)) or common.too_many_rows(spec, binding.MAX_ROWS)


def libraries(spec: Spec, device: Device) -> tuple[str, ...]:
    """The device libraries of such a weight on a device."""
    return (binding.library_name("gemv_fp8", spec.dtype, form_of(spec)),)


def by_hip(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x."""
    return binding.launch(Fp8Rows(q, scale).launch(), x, bias=bias)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if form_of(spec) == fp8_name(FP8[1]):
        return "it reads e4m3fn alone"
    if spec.dtype not in HALVES:
        return f"its activations are bfloat16 or float16, not {spec.dtype}"
    return common.too_large(spec) or launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `triton`: a GEMM that makes floats of the weight in registers."""
    from accelpatch.kernels.triton.fp8_weights import linear

    return linear(x, q, scale, bias)


def by_torch(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        # in float32 at least: a row's scale can be smaller than float16 says
        wide = torch.promote_types(dtype, torch.float32)
        return q[start:stop].to(wide).mul_(along(scale[start:stop].to(wide), q.shape[1]))

    return common.by_row_blocks(x, q.shape[0], q.shape[1], rows, bias)


def cpu_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_cpu` cannot run a spec; None where it can."""
    return "it reads e4m3fn alone" if form_of(spec) == fp8_name(FP8[1]) else stored.why_not(spec, device)


def by_cpu(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `cpu_stored`: the native library, which makes 128 values float in a core's cache."""
    return stored.linear(x, q, stored.E4M3, scale, bias)


@operation("fp8_linear")
def fp8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[..., N] = x[..., K] @ (q * scale)^T + bias.

    x[..., K] float; q[N, K] float8 (e4m3fn or e4m3fnuz); scale[N, 1] or [N, ceil(K / 128)] float; bias[N] float or
    None. y has x's dtype,
    contiguous. Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run("fp8_linear", spec, x.device, (x, q, scale, bias))
    return y


fp8_linear.register_fake(common.rows_like(spec))
gradient.differentiate(fp8_linear, Fp8Rows, partial(gradient.of_rows, dense=dense))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, both fp8 formats."""

    def case(m: int, n: int, k: int, bias: bool, form: torch.dtype, blocks: bool = False) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
            groups = -(-k // FP8_BLOCK) if blocks else 1
            x, scale, b = common.operands(generator, dtype, device, m, n, k, groups, bias)
            q = (50 * torch.randn(n, k, generator=generator)).clamp(-240, 240).to(form).to(device)
            return x, q, scale / 50, b

        name = f"m{m}-n{n}-k{k}-{str(form)[19:]}{'-blocks' if blocks else ''}{'-bias' if bias else ''}"
        return Case(name, make)

    sizes = [(m, n, k, bias) for m, n, k, _, bias in common.SIZES]
    rows = [case(*size, FP8[i % 2]) for i, size in enumerate((*sizes, (5, 33, 65, True)))]
    blocks = (
        (1, 576, 300, True),
        (7, 33, 128, False),
        (8, 65, 1152, False),
        (40, 130, 576, True),
        (70, 33, 300, True),
        (0, 5, 260, True),
    )
    return rows + [case(*size, FP8[0], blocks=True) for size in blocks]


IMPLEMENTATIONS = {
    "cpu_stored": Implementation(by_cpu, cpu_why_not),
    "hip": Implementation(by_hip, why_not),
    "triton_wgmma": Implementation(wgmma.by_fp8, wgmma.fp8_why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {"fp8_linear": Kernel(fp8_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
