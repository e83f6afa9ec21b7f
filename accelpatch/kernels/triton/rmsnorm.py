"""RMSNorm, one row per program, with the residual addition before or after it; see ../ops/norm/rmsnorm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import dependent, on, rounds_to_e4m3, warps
from accelpatch.kernels.triton.quantize_rows import store_row


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total, given, scales, width, eps, ADD: tl.constexpr, AFTER: tl.constexpr,
    ROWS: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, PLUS_ONE: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    row = place * width
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
    if ROWS:  # of what the output would be
        normed = normed.to(total.dtype.element_ty).to(tl.float32)
        store_row(normed, given, y, scales, place, columns, width, STATIC, NATIVE)
    else:
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


def rmsnorm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the operation: (q, scale, s)[..., K]."""
    x = x.contiguous()
    residual_or_x = x if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(x)
    q, scales = torch.empty_like(x, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _launch(x, residual_or_x, weight, q, total, eps, plus_one, add=residual is not None, scales=scales, scale=scale)
    return q, scales, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, total: Tensor, eps: float, plus_one: bool, *,
    add: bool = False, after: bool = False, scales: Tensor | None = None, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """total: receives the sum before the norm; with `after`, only its dtype is used: the norm's before the sum. scales:
    receives those of the rows, which y then has in 8 bits, or the static `scale`."""
    width = x.shape[-1]
    block, (overlapped, options) = triton.next_power_of_2(width), dependent(x)
    if x.numel():
        with on(x):
            _row[(x.numel() // width,)](
                x, residual, weight.contiguous(), y, total, y if scale is None else scale,
                y if scales is None else scales, width, eps, add, after, scales is not None, scale is not None,
                rounds_to_e4m3(x), plus_one, overlapped, block,
                num_warps=warps(block), **options,
            )  # fmt: skip
