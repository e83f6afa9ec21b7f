"""Rows of x with their columns in another order, and an RMSNorm before it; see ../ops/linear/reorder.py.

A program has some columns of a row, and works out the row's norm for itself: the rows are few.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import cdiv, dependent, on

COLUMNS = 512  # of a program


@triton.jit
def _reordered(  # type: ignore[no-untyped-def]
    x, order, weight, y, width, x_stride, eps, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, DEPENDENT: tl.constexpr,
    ROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    places = tl.load(order + columns, mask=inside, other=0)
    row = x + tl.program_id(0).to(tl.int64) * x_stride
    values = tl.load(row + places, mask=inside, other=0.0)
    if NORM:
        every = tl.arange(0, ROW)
        wide = tl.load(row + every, mask=every < width, other=0.0).to(tl.float32)
        scale = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
        normed = values.to(tl.float32) * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        normed = normed * (scale + 1.0) if PLUS_ONE else normed.to(values.dtype).to(tl.float32) * scale
        values = normed.to(y.dtype.element_ty)
    tl.store(y + tl.program_id(0).to(tl.int64) * width + columns, values, mask=inside)


def reorder(x: Tensor, order: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """As the operation: y[M, K]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    y, norm = x.new_empty((m, k)), weight is not None
    overlapped, options = dependent(x)
    if m:
        with on(x):
            _reordered[(m, cdiv(k, COLUMNS))](
                x, order.contiguous(), x if weight is None else weight.contiguous(), y, k, x.stride(0), eps, norm,
                plus_one, overlapped, triton.next_power_of_2(k) if norm else 1, COLUMNS, num_warps=4, **options,
            )  # fmt: skip
    return y
