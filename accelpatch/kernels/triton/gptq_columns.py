"""Columns of a weight rounded one after the other, each making up for those before it; see quant/gptq.py.

A program has some rows of a block of columns in registers, so that the block takes one launch in place of twenty for
each of its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.launch import cdiv, on

ROWS, WARPS = 16, 4
LEAST = 16  # columns of a tile


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    w, factor, step, zero, base, codes, errors, rows, count, stride, low, high, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = row < rows
    both = here[:, None] & (columns < count)[None, :]
    tile = tl.load(w + row[:, None] * stride + columns[None, :], mask=both, other=0.0)
    for i in range(count):
        at = i * rows + row
        scale = tl.load(step + at, mask=here, other=0.0)
        middle, least = tl.load(zero + at, mask=here, other=0.0), tl.load(base + at, mask=here, other=0.0)
        value = tl.sum(tl.where((columns == i)[None, :], tile, 0.0), axis=1)
        steps = (value - least) / tl.where(scale == 0.0, 1.0, scale)
        steps = tl.minimum(tl.maximum(steps, -65536.0), 65536.0)
        steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
        code = tl.minimum(tl.maximum(steps + middle, low), high)
        error = (value - ((code - middle) * scale + least)) / tl.load(factor + i * count + i)
        later = tl.load(factor + i * count + columns, mask=(columns >= i) & (columns < count), other=0.0)
        tile -= error[:, None] * later[None, :]
        tl.store(codes + at, code, mask=here)
        tl.store(errors + at, error, mask=here)


def round_columns(
    w: Tensor, factor: Tensor, affine: tuple[Tensor, Tensor, Tensor], limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Codes and errors, float32 [N, C] each, of the columns w[N, C] float32, whose last stride is 1.

    factor[C, C]: of quant.gptq.inverse_factor. affine: step, zero and base [N, C] float32 of each value: it is
    (code - zero) step + base. limits: the smallest and the largest code.
    """
    n, count = w.shape
    step, zero, base = (one.t().contiguous() for one in affine)
    codes, errors = (torch.empty(count, n, dtype=torch.float32, device=w.device) for _ in range(2))
    with on(w):
        _columns[(cdiv(n, ROWS),)](
            w, factor.contiguous(), step, zero, base, codes, errors, n, count, w.stride(0), *map(float, limits),
            ROWS, max(LEAST, triton.next_power_of_2(count)), num_warps=WARPS,
        )  # fmt: skip
    return codes.t(), errors.t()
