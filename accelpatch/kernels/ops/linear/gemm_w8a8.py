"""Products of int8 matrices with the scales, the addition and the activation behind them, and the five of SmoothQuant.

    C = A . B^T                                       A[M, K], B[N, K] int8, C int32, exact; or batched, A[B, M, K]
    E = activation(fma(a, C - correction, beta D)) + residual       a = (alpha row_scale[m]) column_scale[n]

    linear_abde_i8        E = alpha A B + beta D                    A, B, D, E int8
    linear_relu_abde_i8   the same through ReLU
    linear_ab_i8_de_f32   E = alpha A B + beta D                    A, B int8; D, E float
    bmm_abe_i8            E = alpha A B                             batched, all int8
    bmm_ab_i8_e_f32       E = alpha A B                             batched, int8 in, float out

B is column-major: a weight [N, K] as it lies. D is [M, N], or a vector [N] for all rows (a stride of 0). All that is
float is computed in float32 and rounded once to E's dtype: int8 to nearest even, saturated at -128 and 127. An
activation with a zero point z is (A - z) . B^T = C - z sum_k B[n, k], the correction. Source: Xiao et al. 2022,
arXiv:2211.10438; names as in the guide to AMD Instinct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.ck import binding as ck
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "gemm_w8a8"
LONGEST = (1 << 17) - 1  # K up to which 128 * 128 * K is an int32
OUTPUTS = (torch.int8, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("none", "relu", "silu", "gelu", "gelu_tanh")
EXACT = 1024  # values of K whose products float32 adds up exactly


FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": lambda y: torch.where(y < 0, torch.zeros_like(y), y),
    "silu": lambda y: y * torch.sigmoid(y),
    "gelu": lambda y: y * 0.5 * (1 + torch.erf(y * 0.5**0.5)),
    "gelu_tanh": lambda y: 0.5 * y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3))),
}


def accumulators(a: Tensor, b: Tensor) -> Tensor:
    """C[..., M, N] as float64, exact, of int8 a[..., M, K] and b[..., N, K]."""
    return a.double() @ b.double().transpose(-1, -2)


def reference(
    a: Tensor, b: Tensor, alpha: float, row_scale: Tensor | None = None, column_scale: Tensor | None = None,
    d: Tensor | None = None, beta: float = 1.0, correction: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """In float64 from the float32 scales on, with the one rounding that beta D has in float32."""
    c = accumulators(a, b)
    c = c if correction is None else c - correction.double()
    factor = torch.full((1, 1), alpha, dtype=torch.float32, device=a.device)
    factor = factor if row_scale is None else factor * row_scale.float().unsqueeze(1)
    factor = factor if column_scale is None else factor * column_scale.float().unsqueeze(0)
    y = c * factor.double()
    if d is not None:
        y = y + (torch.tensor(beta, dtype=torch.float32).to(d.device) * d.float()).double()
    y = FORMULAS[activation](y) + (0 if residual is None else residual.double())
    return y.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else y.to(dtype)


def scales(alpha: float, row_scale: Tensor | None, column_scale: Tensor | None) -> Tensor:
    """(alpha row_scale[m]) column_scale[n], in float32: [1, 1], [M, 1], [1, N] or [M, N]."""
    vectors = [one for one in (row_scale, column_scale) if one is not None]
    found = torch.full((1, 1), alpha, dtype=torch.float32, device=vectors[0].device if vectors else None)
    found = found if row_scale is None else found * row_scale.float()[:, None]
    return found if column_scale is None else found * column_scale.float()[None]


def stored(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y rounded to an output's dtype."""
    return y.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else y.to(dtype)


def spec(
    a: Tensor, b: Tensor, alpha: float, row_scale: Tensor | None = None, column_scale: Tensor | None = None,
    d: Tensor | None = None, beta: float = 1.0, correction: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit together."""
    for name, one in (("A", a), ("B", b)):
        fits = one.dtype == torch.int8 and one.dim() == a.dim() and one.dim() in (2, 3)
        require(fits, OP, f"{name} is int8 [M, K], or [B, M, K] in a batch, not {one.dtype} {list(one.shape)}")
    (m, k), n = a.shape[-2:], b.shape[-2]
    alike = a.shape[:-2] == b.shape[:-2] and b.shape[-1] == k
    require(alike, OP, f"A is {list(a.shape)} and B {list(b.shape)}: their batches and last dimensions must be equal")
    longest = LONGEST if correction is None else LONGEST // 2  # a zero point doubles the magnitude of A
    require(1 <= k <= longest and n >= 1, OP, f"K is 1 to {longest} and N at least 1, not {k} and {n}")
    require(dtype in OUTPUTS, OP, f"E is one of {', '.join(map(str, OUTPUTS))}, not {dtype}")
    require(activation in NAMES, OP, f"activation is one of {', '.join(NAMES)}, not {activation!r}")
    sizes = {"row_scale": (row_scale, m), "column_scale": (column_scale, n), "correction": (correction, n)}
    for name, (vector, size) in sizes.items():
        if vector is not None:
            wanted = vector.dtype == torch.int32 if name == "correction" else vector.dtype in FLOATS
            require(wanted and vector.shape == (size,), OP, f"{name} is [{size}], not {say(vector)}")
    for name, matrix in (("D", d), ("residual", residual)):
        shapes = ((n,), (*a.shape[:-1], n)) if name == "D" else ((*a.shape[:-1], n),)
        fits = matrix is None or (matrix.shape in shapes and matrix.dtype in (torch.int8, *FLOATS))
        require(
            fits,
            OP,
            f"{name} is {' or '.join(str(list(one)) for one in shapes)}, not {None if matrix is None else say(matrix)}",
        )
    others = {"B": b, "row_scale": row_scale, "column_scale": column_scale, "D": d, "residual": residual}
    for name, tensor in {**others, "correction": correction}.items():
        if tensor is not None:
            require(tensor.device == a.device, OP, f"A lies on {a.device}, {name} on {tensor.device}: move one")
    options = {
        "d": None if d is None else d.dtype, "scaled": row_scale is not None or column_scale is not None,
        "activation": activation, "correction": correction is not None, "residual": residual is not None,
    }  # fmt: skip
    return of_shape(m, n, k, dtype, a.shape[0] if a.dim() == 3 else 1, **options)


def of_shape(m: int, n: int, k: int, dtype: torch.dtype, batch: int = 1, **options: Any) -> Spec:
    """The Spec of products of this size, for planning. options: those of the Spec: "d", its dtype or
    None; "scaled", "correction" and "residual", whether each is given; "activation", its name."""
    return Spec(OP, {"M": m, "N": n, "K": k, "B": batch}, dtype, options=options)


def finished(
    c: Tensor, alpha: float, row_scale: Tensor | None, column_scale: Tensor | None, d: Tensor | None, beta: float,
    correction: Tensor | None, activation: str, residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """E of the int32 accumulators c, in plain torch. One operation of float64 stands for the fused one of float32."""
    c = c if correction is None else c - correction
    y = c.to(torch.float32).double() * scales(alpha, row_scale, column_scale).to(c.device).double()
    if d is not None:
        y = y + (d.float() * beta).double()
    y = y.float()
    if activation != "none":
        y = ACTIVATIONS[activation](y)
    return stored(y if residual is None else y + residual.float(), dtype).contiguous()


def by_torch(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """The implementation `torch`: products in float32, exact for so many values of K, added up as int32."""
    parts = zip(a.split(EXACT, -1), b.split(EXACT, -1), strict=True)
    c = sum((x.float() @ w.float().transpose(-1, -2)).to(torch.int32) for x, w in parts)
    assert isinstance(c, Tensor)
    return finished(c, *rest)


def int_mm_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_int_mm` cannot run a spec; None where it can."""
    m, n, k = (spec.sizes[name] for name in "MNK")
    if spec.sizes["B"] > 1:
        return "torch._int_mm takes no batch"
    if m == 0:
        return "torch._int_mm takes no matrix without rows"
    if device.kind != "cpu" and (m <= 16 or n % 8 or k % 8):
        return f"torch._int_mm takes more than 16 rows on a GPU, and N and K that are multiples of 8, not {m}, {n}, {k}"
    return None


def by_int_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """The implementation `int_mm`: torch's product of integers, the rest in plain torch."""
    c = torch._int_mm(a.flatten(0, -2).contiguous(), b.flatten(0, -2).contiguous().t())
    return finished(c.view(*a.shape[:-1], -1), *rest)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    m, n = spec.sizes["M"], spec.sizes["N"]
    if max(m, n) >= 1 << 30 or m * n * spec.sizes["B"] >= 1 << 31:
        return f"M = {m} and N = {n} are more than its 32-bit indices reach"
    return launch.why_not(device, *((spec.dtype,) if spec.dtype.is_floating_point else ()))


def by_triton(*args: Any) -> Tensor:
    """The implementation `triton`: tiles, or for few rows a stream of the weight."""
    from accelpatch.kernels.triton.gemm_w8a8 import gemm_w8a8 as run

    return run(*args)


@operation(OP)
def gemm_w8a8(
    a: Tensor, b: Tensor, alpha: float, row_scale: Tensor | None = None, column_scale: Tensor | None = None,
    d: Tensor | None = None, beta: float = 1.0, correction: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """E[M, N] = activation(fma(alpha row_scale column_scale, A B - correction, beta D)) + residual, contiguous.

    a[M, K], b[N, K] int8, or with a batch before both; row_scale[M], column_scale[N] float32; d[N] or [M, N] int8 or
    float; correction[N] int32; residual[M, N]; dtype: of E, int8 or float. activation: one of `NAMES`. Raises
    KernelError for arguments that do not fit.
    """
    args = (a, b, alpha, row_scale, column_scale, d, beta, correction, activation, residual, dtype)
    y: Tensor = dispatch.run(OP, spec, a.device, args)
    return y


@gemm_w8a8.register_fake
def _fake(
    a: Tensor, b: Tensor, alpha: float, row_scale: Tensor | None = None, column_scale: Tensor | None = None,
    d: Tensor | None = None, beta: float = 1.0, correction: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    spec(a, b, alpha, row_scale, column_scale, d, beta, correction, activation, residual, dtype)
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)


Scale = float | Tensor


def linear_abde_i8(a: Tensor, b: Tensor, d: Tensor, alpha: Scale, beta: Scale, *, zero_point: int = 0) -> Tensor:
    """E[M, N] int8 = alpha A B + beta D, for a[M, K], b[N, K] and d[M, N] or [N], all int8.

    alpha: a number, or a vector: [M, 1] of A's rows, [N] of columns. beta: a number, or [N] of columns. zero_point: of
    A. Raises KernelError for arguments that do not fit.
    """
    return _linear(a, b, d, alpha, beta, zero_point, "none", torch.int8)


def linear_relu_abde_i8(a: Tensor, b: Tensor, d: Tensor, alpha: Scale, beta: Scale, *, zero_point: int = 0) -> Tensor:
    """`linear_abde_i8` through ReLU."""
    return _linear(a, b, d, alpha, beta, zero_point, "relu", torch.int8)


def linear_ab_i8_de_f32(
    a: Tensor, b: Tensor, d: Tensor, alpha: Scale, beta: Scale, *, zero_point: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """As `linear_abde_i8` with d[M, N] or [N] float, and E float32, or bfloat16 or float16 by `dtype`."""
    return _linear(a, b, d, alpha, beta, zero_point, "none", dtype)


def bmm_abe_i8(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """E[B, M, N] int8 = alpha A B, for a[B, M, K] and b[B, N, K] int8. Raises KernelError for others."""
    return gemm_w8a8(a, b, alpha, None, None, None, 1.0, None, "none", None, torch.int8)


def bmm_ab_i8_e_f32(a: Tensor, b: Tensor, alpha: float, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `bmm_abe_i8` with E float32, or bfloat16 or float16 by `dtype`."""
    return gemm_w8a8(a, b, alpha, None, None, None, 1.0, None, "none", None, dtype)


def _linear(
    a: Tensor, b: Tensor, d: Tensor, alpha: Scale, beta: Scale, zero_point: int, activation: str, dtype: torch.dtype
) -> Tensor:
    rows = columns = None
    if isinstance(alpha, Tensor):
        by_row = alpha.dim() == 2 and alpha.shape[1] == 1
        rows, columns, alpha = (alpha[:, 0], None, 1.0) if by_row else (None, alpha.flatten(), 1.0)
    if isinstance(beta, Tensor):
        d, beta = d.float() * beta.float(), 1.0
    correction = zero_point * b.sum(-1, dtype=torch.int32) if zero_point else None
    return gemm_w8a8(a, b, alpha, rows, columns, d, beta, correction, activation, None, dtype)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, vectors, D as a matrix and as a vector, every output."""

    def case(m: int, n: int, k: int, dtype: torch.dtype, activation: str) -> Case:
        def make(generator: torch.Generator, wanted: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            a, b = (torch.randint(-128, 128, (size, k), generator=generator).to(device, torch.int8) for size in (m, n))
            row, column = (torch.rand(size, generator=generator).to(device) / 9 for size in (m, n))
            d = torch.randn(*((n,) if m % 2 else (m, n)), generator=generator).to(device)
            residual = torch.randn(m, n, generator=generator).to(device) if activation == "gelu" else None
            sums = b.sum(-1, dtype=torch.int32) if activation == "relu" else None
            return a, b, 1 / k, row, column, d, 0.5, sums, activation, residual, dtype

        return Case(f"m{m}-n{n}-k{k}-{str(dtype)[6:]}-{activation}", make)

    sizes = ((1, 64, 64), (2, 7, 66), (0, 7, 66), (7, 33, 130), (129, 65, 96), (1, 7, 11008))
    return [case(*size, OUTPUTS[at % 4], NAMES[at % 5]) for at, size in enumerate(sizes)]


IMPLEMENTATIONS = {
    "ck": Implementation(ck.gemm_w8a8, ck.why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "int_mm": Implementation(by_int_mm, int_mm_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(gemm_w8a8, reference, spec, IMPLEMENTATIONS, cases)}
