"""GEMM of some rows with a weight of e4m3fn, made float in registers; see ops/linear/fp8_linear.py.

As the GEMM of int8 (gemm.py). Where a row has a scale for each 128 values of K, a K tile is such a group, and the
scale multiplies the sum over the tile. Codes are exact in x's dtype. For more rows of x than the largest block the
weight is dequantised to memory for torch's GEMM, rounded to x's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.row_major import FP8_BLOCK
from accelpatch.kernels.triton.dequantize import _of_e4m3, int8_floats
from accelpatch.kernels.triton.gemm import Block, Blocks, _some, flat_rows, grid, in_runs, leave
from accelpatch.kernels.triton.launch import on, rounds_to_e4m3
from accelpatch.kernels.triton.weight_only import as_written

BLOCKS = Blocks((Block(16, 64, FP8_BLOCK, 4, 4), Block(32, 64, FP8_BLOCK, 4, 4), Block(64, 64, FP8_BLOCK, 4, 4)))


@triton.jit(do_not_specialize=["m"])
def _fp8_gemm(  # type: ignore[no-untyped-def]
    x, w, scale, bias, y, parts, m, n, k, x_stride, run, groups,
    ROWS_ALONE: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # programs that share weight rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    clamped = tl.minimum(rows, n - 1)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * x_stride
    w_rows = w + clamped[:, None] * k
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(split * run, tl.minimum((split + 1) * run, k), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        codes = _some(w_rows + columns[None, :], columns, k, EVEN, True)
        weights = codes.to(tl.float8e4nv, bitcast=True) if NATIVE else _of_e4m3(codes.to(tl.int32))
        x_tile = _some(x_rows + columns[:, None], columns, k, EVEN, False)
        if ROWS_ALONE:
            total = tl.dot(weights.to(x.dtype.element_ty), x_tile, total)
        else:
            scales = tl.load(scale + clamped * groups + start // COLUMNS)
            total += tl.dot(weights.to(x.dtype.element_ty), x_tile) * scales[:, None]
    if ROWS_ALONE:
        total = total * tl.load(scale + clamped)[:, None]
    leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


def linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """As the operation."""
    flat, q, scale = flat_rows(x), q.contiguous(), scale.to(torch.float32).contiguous()
    (m, k), (n, groups) = flat.shape, scale.shape
    if m > BLOCKS.most:
        return as_written(flat, n, bias, int8_floats(q, scale)).view(*x.shape[:-1], n)
    q, native = q.view(torch.int8), rounds_to_e4m3(x)
    y, bias = x.new_empty((m, n)), None if bias is None else bias.contiguous()

    def launch_gemm(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        _fp8_gemm[grid(flat, n, block, splits)](
            flat, q, scale, y if bias is None else bias, y, parts, m, n, k, flat.stride(0), run, groups,
            groups == 1, bias is not None, splits > 1, k % block.columns == 0, native, block.tokens, block.rows,
            block.columns, **block.options(),
        )  # fmt: skip

    if m:
        with on(x):
            in_runs(flat, y, bias, BLOCKS, launch_gemm)
    return y.view(*x.shape[:-1], n)
