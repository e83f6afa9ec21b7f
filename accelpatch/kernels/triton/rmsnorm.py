"""RMSNorm, one row per program, with the residual addition before or after it; see ../ops/rmsnorm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import release, wait
from accelpatch.kernels.triton.launch import dependent, on, warps


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    y,
    total,
    width,
    eps,
    ADD: tl.constexpr,
    AFTER: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        release()
        wait()
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    if ADD:
        more = tl.load(residual + row + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normed * (scale + 1.0) if PLUS_ONE else normed.to(values.dtype).to(tl.float32) * scale
    if AFTER:
        more = tl.load(residual + row + columns, mask=inside, other=0.0)
        normed = more.to(tl.float32) + normed.to(total.dtype.element_ty).to(tl.float32)
    tl.store(y + row + columns, normed.to(y.dtype.element_ty), mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """As the operation: y[..., K]."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype))
    _launch(x, x, weight, y, x, eps, plus_one)
    return y


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """As the operation: (y, s)[..., K]."""
    x, residual = x.contiguous(), residual.contiguous()
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = torch.empty_like(x, dtype=total.dtype if plus_one else torch.promote_types(total.dtype, weight.dtype))
    _launch(x, residual, weight, y, total, eps, plus_one, add=True)
    return y, total


def rmsnorm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """As the operation: y[..., K]."""
    x, residual = x.contiguous(), residual.contiguous()
    normed = x.new_empty(0, dtype=x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype))
    y = torch.empty_like(x, dtype=torch.promote_types(normed.dtype, residual.dtype))
    _launch(x, residual, weight, y, normed, eps, plus_one, after=True)
    return y


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, total: Tensor, eps: float, plus_one: bool, *,
    add: bool = False, after: bool = False,
) -> None:  # fmt: skip
    """total: receives the sum before the norm; with `after`, only its dtype is used: the norm's before the sum."""
    width = x.shape[-1]
    block, (overlapped, options) = triton.next_power_of_2(width), dependent(x)
    if x.numel():
        with on(x):
            _row[(x.numel() // width,)](
                x, residual, weight.contiguous(), y, total, width, eps, add, after, plus_one, overlapped, block,
                num_warps=warps(block), **options,
            )  # fmt: skip
