"""GEMMs with weights in GGUF's blocks (block_values.py has their values); see ../ops/linear/block_linear.py.

For a few rows of x, blocks of the weight are dequantised in registers, rounded to x's dtype and multiplied (split K as
in gemm.py). For more the weight is dequantised to memory, slice by slice, for torch's own GEMM.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.layouts.gguf_blocks import columns
from accelpatch.kernels.triton.block_values import FORMS, block_values
from accelpatch.kernels.triton.dequantize import Floats, by_slices
from accelpatch.kernels.triton.gemm import Block, Blocks, flat_rows, grid, in_runs, leave
from accelpatch.kernels.triton.launch import cdiv, on

BLOCKS = Blocks((Block(16, 64, 64, 4, 3), Block(32, 64, 64, 4, 3), Block(64, 64, 64, 4, 3)))


@triton.jit(do_not_specialize=["m"])
def _block_gemm(  # type: ignore[no-untyped-def]
    x, blocks, bias, y, parts, m, n, k, x_stride, row_bytes, run,
    FORM: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # programs that share weight rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * x_stride
    w_rows = blocks + tl.minimum(rows, n - 1)[:, None] * row_bytes
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(split * run, tl.minimum((split + 1) * run, k), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if EVEN:
            x_tile = tl.load(x_rows + columns[:, None])
        else:  # K is a multiple of 32: beyond it x is 0, and the last 32 columns of the weight are read again
            x_tile = tl.load(x_rows + columns[:, None], mask=(columns < k)[:, None], other=0.0)
            columns = tl.where(columns < k, columns, columns - 32)
        weights = block_values(w_rows, columns[None, :], FORM)
        total = tl.dot(weights.to(x.dtype.element_ty), x_tile, total)
    leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


@triton.jit
def _block_rows(  # type: ignore[no-untyped-def]
    blocks, out, n, k, row_bytes, FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < k
    row_at = blocks + tl.minimum(rows, n - 1)[:, None] * row_bytes
    values = block_values(row_at, tl.where(inside, columns, 0)[None, :], FORM)
    mask = (rows < n)[:, None] & inside[None, :]
    tl.store(out + rows[:, None] * k + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


def block_floats(blocks: Tensor, form: str) -> Floats:
    """A function (start, stop, out) that writes those rows of blocks[N, row bytes] to out[stop - start, K]."""
    k = columns(form, blocks.shape[1])

    def floats(start: int, stop: int, out: Tensor) -> None:
        rows = blocks if stop - start == len(blocks) else blocks[start:stop]
        _block_rows[(cdiv(stop - start, 16), cdiv(k, 256))](
            rows, out, stop - start, k, blocks.shape[1], FORMS[form], 16, 256
        )

    return floats


def block_linear(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """As the operation, for a form of FORMS."""
    blocks, flat = blocks.contiguous(), flat_rows(x)
    bias = None if bias is None else bias.contiguous()
    (m, k), n = flat.shape, len(blocks)
    y = x.new_empty((m, n))

    def launch_gemm(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        _block_gemm[grid(flat, n, block, splits)](
            flat, blocks, y if bias is None else bias, y, parts, m, n, k, flat.stride(0), blocks.shape[1], run,
            FORMS[form], k % block.columns == 0, bias is not None, splits > 1, block.tokens, block.rows, block.columns,
            **block.options(),
        )  # fmt: skip

    if m:
        with on(x):
            if m <= BLOCKS.most and x.dtype in HALVES:
                in_runs(flat, y, bias, BLOCKS, launch_gemm)
            else:
                by_slices(flat, y, bias, block_floats(blocks, form))
    return y.view(*x.shape[:-1], n)
