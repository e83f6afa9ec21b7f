"""LayerNorm with int8 outputs, one row per program; see ../ops/norm/layernorm_q.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import dependent, on, warps
from accelpatch.kernels.triton.quantize_rows import nearest


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    x, weight, bias, q, x_stride, width, eps, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr
):
    overlap(DEPENDENT)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=0)  # tl.max ignores NaN
    centred = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    y = centred * factor * scale + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(most < float("inf"), y, 0.0)
    tl.store(q + row * width + columns, nearest(y).to(tl.int8), mask=inside)


def layernorm_q(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As the operation."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    q = x.new_empty(x.shape, dtype=torch.int8)
    block, (overlapped, options) = triton.next_power_of_2(width), dependent(x)
    if q.numel():
        with on(x):
            _row[(flat.shape[0],)](
                flat, weight.contiguous(), bias.contiguous(), q, flat.stride(0), width, eps, overlapped, block,
                num_warps=warps(block), **options,
            )  # fmt: skip
    return q
