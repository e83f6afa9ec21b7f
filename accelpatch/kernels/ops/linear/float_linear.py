"""Linear layer with a plain weight: y[M, N] = x[M, K] @ w[N, K]^T + bias[N], weight and activations of one dtype.

For few rows of x, where reading the weight is the bottleneck; torch's GEMM serves the rest.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.added import PREFERRED
from accelpatch.kernels.arguments import FLOATS, HALVES, require, say
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "float_linear"


def dense(dtype: torch.dtype, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias in `dtype`."""
    return w.to(dtype), None if bias is None else bias.to(dtype)


def reference(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's own linear layer."""
    return functional.linear(x, w, None if bias is None else bias.to(w.dtype))


def blocks(*weight: Tensor | None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    return common.float64_blocks(dense, *weight)


def spec(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op = OP
    require(w.dim() == 2 and w.dtype in FLOATS, op, f"w is float [N, K], not {say(w)}")
    require(x.dim() >= 1 and x.dtype == w.dtype, op, f"x is {w.dtype} [..., K] as the weight, not {say(x)}")
    n, k = w.shape
    require(n >= 1 and k >= 1, op, f"the weight is empty: N = {n}, K = {k}")
    require(x.shape[-1] == k, op, f"x has {x.shape[-1]} features, the weight {k}")
    common.check_bias(op, x, n, bias, w=w)
    return of_shape(n, k, x.dtype, m=x.numel() // k)


def of_shape(n: int, k: int, dtype: torch.dtype, *, m: int = 1, prefer: str = "") -> Spec:
    """The Spec of a linear layer of this size, for planning before there is a weight. prefer: as of `float_linear`."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, options={PREFERRED: prefer} if prefer else {})


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    return binding.why_not(spec, device, "gemv") or common.too_many_rows(spec, binding.MAX_ROWS)


def libraries(dtype: torch.dtype) -> tuple[str, ...]:
    """The device libraries that `by_hip` launches."""
    return (binding.library_name("gemv", dtype),)


def by_hip(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x."""
    return binding.launch(Plain(w).launch(), x, bias=bias)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if reason := common.too_large(spec) or launch.why_not(device, spec.dtype):
        return reason
    if spec.dtype not in HALVES:
        return f"its activations are bfloat16 or float16, not {spec.dtype}"
    if not spec.sizes["M"]:
        return "x has no rows"
    return None if spec.options.get("contiguous", True) else "the weight has gaps"


def by_triton(x: Tensor, w: Tensor, bias: Tensor | None = None, gate: bool = False) -> Tensor:
    """The implementation `triton`. gate: returns silu(first half of the columns) * second half."""
    from accelpatch.kernels.triton import gemm

    return gemm.linear(x, w, None, bias, gate)


def facts(x: Tensor, w: Tensor, bias: Tensor | None = None) -> dispatch.Facts:
    """How the weight lies in memory, which `by_triton` depends on."""
    return (("contiguous", w.is_contiguous()),)


@operation(OP)
def float_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, prefer: str = "") -> Tensor:
    """y[..., N] = x[..., K] @ w[N, K]^T + bias[N], in x's dtype, contiguous.

    x, w float of one dtype; bias float or None. prefer: a user's implementation that runs where it can. Raises
    KernelError for arguments that do not fit together.
    """
    named = ((PREFERRED, prefer),) if prefer else ()
    y: Tensor = dispatch.run(OP, spec, x.device, (x, w, bias), (*facts(x, w), *named))
    return y


@float_linear.register_fake
def _fake(x: Tensor, w: Tensor, bias: Tensor | None = None, prefer: str = "") -> Tensor:
    return common.rows_like(spec)(x, w, bias)


gradient.differentiate(float_linear, Plain, partial(gradient.of_rows, dense=dense), trains=True)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes."""

    def case(m: int, n: int, k: int, bias: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
            x, _, b = common.operands(generator, dtype, device, m, n, k, 1, bias)
            w = (torch.randn(n, k, generator=generator) / k**0.5).to(device, dtype)
            return x, w, b

        return Case(f"m{m}-n{n}-k{k}{'-bias' if bias else ''}", make)

    sizes = [(m, n, k, bias) for m, n, k, _, bias in common.SIZES]
    return [case(*size) for size in (*sizes, (5, 33, 65, True), (9, 16, 2048, False), (64, 7, 129, True))]


IMPLEMENTATIONS = {
    "hip": Implementation(by_hip, why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(reference, dispatch.anywhere),
}
KERNELS = {OP: Kernel(float_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
