"""Shared by linear layers with a quantised weight: argument checks, and computing by blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.arguments import FLOATS, check_scale, require, say
from accelpatch.kernels.codebooks import E4M3, NVFP4, scale_dtype
from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.spec import Blocks, Spec

#: elements of weight dequantised at once on a CPU: 1 MiB of float32 stays in a core's cache
CPU_BLOCK = 1 << 18
#: on a device: large enough for the GEMM to fill it, and a small part of its memory
DEVICE_BLOCK = 1 << 26
CHECK_BLOCK = 1 << 22  # in float64: 32 MB, or 64 MB of 4-bit weights

#: (m, n, k, groups, bias) for parity checks: odd sizes, empty batches, and a K that is no power of two
SIZES = (
    (1, 64, 64, 1, False),
    (1, 576, 1536, 12, False),
    (0, 7, 66, 1, True),
    (2, 1, 66, 1, True),
    (7, 33, 130, 1, False),
    (129, 65, 96, 3, True),
    (1, 7, 11008, 86, False),
    (3, 1001, 576, 9, False),
    (8, 256, 2, 1, True),
)


#: (dtype, tensors of a weight, bias) -> the weight[N, K] and the bias in that dtype
Dense = Callable[..., tuple[Tensor, Tensor | None]]


def spec(
    op: str, x: Tensor, q: Tensor, bits: int, scale: Tensor, offset: Tensor | None, bias: Tensor | None,
    forms: tuple[torch.dtype, ...] = (torch.int8,),
) -> Spec:  # fmt: skip
    """The Spec of y = x @ weight[N, K]^T for q[N, K bits / 8]. Raises KernelError for arguments that do not fit."""
    named = " or ".join(str(form).removeprefix("torch.") for form in forms)
    require(q.dtype in forms and q.dim() == 2, op, f"q is {named} [N, K {bits} / 8], not {say(q)}")
    n, k = q.shape[0], q.shape[1] * 8 // bits
    require(x.dim() >= 1 and x.dtype in FLOATS, op, f"x is float [..., K], not {say(x)}")
    require(x.shape[-1] == k, op, f"x has {x.shape[-1]} features, the weight {k}")
    require(n >= 1 and k >= 1, op, f"the weight is empty: N = {n}, K = {k}")
    group_size = check_scale(op, n, k, scale, offset)
    check_bias(op, x, n, bias, q=q, scale=scale, offset=offset)
    kind = "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"
    return Spec(op, {"M": x.numel() // k, "N": n, "K": k}, x.dtype, scale.dtype, group_size, kind)


def check_bias(op: str, x: Tensor, n: int, bias: Tensor | None, **weights: Tensor | None) -> None:
    """Raise KernelError unless bias is float [n] or None, and bias and weights are on x's device."""
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == n and bias.dtype in FLOATS
        require(fits, op, f"bias is float [{n}], not {say(bias)}")
    for name, tensor in (*weights.items(), ("bias", bias)):
        if tensor is not None:
            require(tensor.device == x.device, op, f"x lies on {x.device}, {name} on {tensor.device}: move the module")


def too_large(spec: Spec) -> str | None:
    """Why a weight exceeds the 32-bit indices of the Triton kernels; None where it does not."""
    n, k = spec.sizes["N"], spec.sizes["K"]
    return None if n < 1 << 30 and k < 1 << 23 else f"N = {n} is 2^30 or more, or K = {k} 2^23 or more"


def too_many_rows(spec: Spec, most: int) -> str | None:
    """Why x has too many rows for an implementation that takes at most `most`; None where it has not."""
    m = spec.sizes["M"]
    return None if m <= most else f"{m} rows are more than the {most} that it takes"


def by_row_blocks(
    x: Tensor, n: int, k: int, rows: Callable[[int, int, torch.dtype], Tensor], bias: Tensor | None
) -> Tensor:
    """x[..., K] @ weight^T + bias, where `rows(start, stop, dtype)` returns rows of the weight as floats.

    The whole weight never exists as floats. A CPU computes in float64 and rounds once: sums of float32, in the order
    that torch takes for a few rows, lose more than twice what the reference does. Elsewhere the rows are rounded to x's
    dtype, because the matrix units take no other (they accumulate in float32).
    """
    cpu = x.device.type == "cpu"
    dtype = torch.float64 if cpu else x.dtype
    flat = x.reshape(-1, k).to(dtype)
    step = max(1, (CPU_BLOCK if cpu else DEVICE_BLOCK) // k)
    wide = None if bias is None else bias.to(dtype)
    if step >= n and not cpu:
        return functional.linear(flat, rows(0, n, dtype).to(dtype), wide).view(*x.shape[:-1], n)
    y = x.new_empty((flat.shape[0], n))
    for start in range(0, n, step):
        stop = min(start + step, n)
        part = None if wide is None else wide[start:stop]
        y[:, start:stop] = functional.linear(flat, rows(start, stop, dtype).to(dtype), part)
    return y.view(*x.shape[:-1], n)


def float64_blocks(dense: Dense, *weight: Tensor | None) -> Blocks:
    """A weight's rows and its bias in float64, in blocks that fit a cache, each made when it is asked for.

    dense(dtype, *weight) makes the whole weight. weight: its tensors, each with one entry per row, or None.
    """
    q = weight[0]
    assert q is not None
    step = max(1, (CPU_BLOCK if q.device.type == "cpu" else CHECK_BLOCK) // q.shape[1])
    for start in range(0, q.shape[0], step):
        rows = slice(start, min(start + step, q.shape[0]))
        yield rows, partial(dense, torch.float64, *(None if part is None else part[rows] for part in weight))


def dense_of(rows: RowMajor, dense: Dense, dtype: torch.dtype, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight[N, K] as floats in `dtype`, its columns in the order of the inputs, and the bias.

    dense: makes both, from (dtype, *arguments, bias)."""
    full, float_bias = dense(dtype, *rows.arguments(), bias)
    if rows.order is not None:
        full = torch.empty_like(full).index_copy_(1, rows.order.long(), full)
    return full, float_bias


def blocks_of(rows: RowMajor, dense: Dense, bias: Tensor | None) -> Blocks:
    """As `float64_blocks`. dense: as of `dense_of`."""
    step = max(1, (CPU_BLOCK if rows.w.device.type == "cpu" else CHECK_BLOCK) // rows.w.shape[1])
    for start in range(0, rows.n, step):
        some = slice(start, min(start + step, rows.n))
        yield some, partial(dense_of, rows.at(some), dense, torch.float64, None if bias is None else bias[some])


def rows_like(spec: Callable[..., Spec]) -> Callable[..., Tensor]:
    """The fake kernel of y[..., N] in the dtype of x[..., K], contiguous."""

    def fake(x: Tensor, *weight: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], spec(x, *weight).sizes["N"]))

    return fake


def of_codes(scale: Tensor, codes: str) -> tuple[Tensor, Tensor | None]:
    """scale[n, groups] in the dtype that a codebook's scales have; and, for nvfp4, a factor for each row, else None."""
    if codes != NVFP4:
        return scale.to(scale_dtype(codes)), None
    return (scale * 8).to(E4M3), torch.linspace(0.1, 0.2, len(scale), dtype=torch.float64, device=scale.device)[:, None]


def operands(
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    m: int,
    n: int,
    k: int,
    groups: int,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random x[m, k], positive scale[n, groups] float32 near 1 / sqrt(k), and bias[n] or None, for parity checks."""
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    scale = (torch.rand(n, groups, generator=generator) + 0.5).to(device) / k**0.5
    b = torch.randn(n, generator=generator).to(device, dtype) if bias else None
    return x, scale, b
