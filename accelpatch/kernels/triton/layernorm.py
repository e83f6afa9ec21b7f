"""LayerNorm of a sum, one row per program, with its rows in 8 bits or without; see ../ops/norm/layernorm.py."""

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
    x, residual, weight, bias, y, kept, given, scales, width, eps, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, NORMED: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y receives the norm, or its rows in 8 bits; kept the sum where there is one, or the norm where NORMED."""
    overlap(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    row = place * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    if ADD:
        more = tl.load(residual + row + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        if not NORMED:
            tl.store(kept + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    normed = normed * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        normed = normed + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(values.dtype)
    if NORMED:
        tl.store(kept + row + columns, normed, mask=inside)
    if ROWS:
        store_row(normed.to(tl.float32), given, y, scales, place, columns, width, STATIC, NATIVE)
    else:
        tl.store(y + row + columns, normed, mask=inside)


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As the operation: (y, s)[..., K]."""
    x = x.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, bias, y, total, eps)
    return y, total


def layernorm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the operation: (q, scale, y or s)[..., K]."""
    x = x.contiguous()
    kept = x if residual is None and not normed else torch.empty_like(x)
    q, scales = torch.empty_like(x, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _launch(x, residual, weight, bias, q, kept, eps, normed=normed, scales=scales, scale=scale)
    return q, scales, kept


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor, eps: float, *,
    normed: bool = False, scales: Tensor | None = None, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """scales: receives those of the rows, which y then has in 8 bits, or the static `scale`."""
    width = x.shape[-1]
    block, (overlapped, options) = triton.next_power_of_2(width), dependent(x)
    if x.numel():
        with on(x):
            _row[(x.numel() // width,)](
                x, x if residual is None else residual.contiguous(), weight.contiguous(),
                weight if bias is None else bias.contiguous(), y, kept, y if scale is None else scale,
                y if scales is None else scales, width, eps, residual is not None, bias is not None,
                scales is not None, normed, scale is not None, rounds_to_e4m3(x), overlapped, block,
                num_warps=warps(block), **options,
            )  # fmt: skip
