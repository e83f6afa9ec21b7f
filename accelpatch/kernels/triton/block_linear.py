"""GEMMs with weights in GGUF's blocks of two levels (Q4_K, Q6_K); see ../ops/linear/block_linear.py.

For a few rows of x, blocks of the weight are dequantised in registers, rounded to x's dtype and multiplied (split K as
in gemm.py). For more the weight is dequantised to memory, slice by slice, for torch's own GEMM.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.layouts.gguf_blocks import FORMS, columns
from accelpatch.kernels.triton.dequantize import Floats, by_slices
from accelpatch.kernels.triton.gemm import Block, Blocks, flat_rows, grid, in_runs, leave
from accelpatch.kernels.triton.launch import cdiv, on

BLOCKS = Blocks((Block(16, 64, 64, 4, 3), Block(32, 64, 64, 4, 3), Block(64, 64, 64, 4, 3)))


@triton.jit
def _half(at):  # type: ignore[no-untyped-def]
    """The float16 in two bytes, float32."""
    bits = tl.load(at).to(tl.int16) | (tl.load(at + 1).to(tl.int16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _q4_k(base, i):  # type: ignore[no-untyped-def]
    """Values i of the blocks that begin at base."""
    j = i // 32
    s = base + 4 + j % 4
    first, behind, late = tl.load(s).to(tl.int32), tl.load(s + 4).to(tl.int32), tl.load(s + 8).to(tl.int32)
    scale = tl.where(j < 4, first & 63, (late & 15) | ((first >> 6) << 4)).to(tl.float32)
    minimum = tl.where(j < 4, behind & 63, (late >> 4) | ((behind >> 6) << 4)).to(tl.float32)
    code = (tl.load(base + 16 + i // 64 * 32 + i % 32).to(tl.int32) >> (j % 2 * 4)) & 15
    return (_half(base) * scale) * code.to(tl.float32) - _half(base + 2) * minimum


@triton.jit
def _q6_k(base, i):  # type: ignore[no-untyped-def]
    """Values i of the blocks that begin at base."""
    half, place = i // 128, i % 128
    low = tl.load(base + 64 * half + place % 64).to(tl.int32) >> (place // 64 * 4)
    high = tl.load(base + 128 + 32 * half + place % 32).to(tl.int32) >> (place // 32 * 2)
    code = (low & 15) | ((high & 3) << 4)
    scale = tl.load(base + 192 + i // 16).to(tl.int8, bitcast=True).to(tl.float32)
    return (_half(base + 208) * scale) * (code - 32).to(tl.float32)


@triton.jit
def _values(rows, columns, SIX: tl.constexpr):  # type: ignore[no-untyped-def]
    """w[rows, columns], float32. rows: addresses of rows, [R, 1]; columns: [1, C]."""
    if SIX:
        return _q6_k(rows + columns // 256 * 210, columns % 256)
    return _q4_k(rows + columns // 256 * 144, columns % 256)


@triton.jit(do_not_specialize=["m"])
def _block_gemm(  # type: ignore[no-untyped-def]
    x, blocks, bias, y, parts, m, n, k, x_stride, row_bytes, run,
    SIX: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # those that share rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * x_stride
    w_rows = blocks + tl.minimum(rows, n - 1)[:, None] * row_bytes
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(split * run, tl.minimum((split + 1) * run, k), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)  # K is a multiple of 256, and these are half of that
        weights = _values(w_rows, columns[None, :], SIX)
        total = tl.dot(weights.to(x.dtype.element_ty), tl.load(x_rows + columns[:, None]), total)
    leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


@triton.jit
def _block_rows(  # type: ignore[no-untyped-def]
    blocks, out, n, k, row_bytes, SIX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = _values(blocks + tl.minimum(rows, n - 1)[:, None] * row_bytes, columns[None, :], SIX)
    tl.store(out + rows[:, None] * k + columns[None, :], values.to(out.dtype.element_ty), mask=(rows < n)[:, None])


def block_floats(blocks: Tensor, form: str) -> Floats:
    """A function (start, stop, out) that writes those rows of blocks[N, row bytes] to out[stop - start, K]."""
    k = columns(form, blocks.shape[1])

    def floats(start: int, stop: int, out: Tensor) -> None:
        rows = blocks if stop - start == len(blocks) else blocks[start:stop]
        _block_rows[(cdiv(stop - start, 16), k // 256)](
            rows, out, stop - start, k, blocks.shape[1], form == "Q6_K", 16, 256
        )

    return floats


def block_linear(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """As the operation, for Q4_K and Q6_K."""
    assert FORMS[form].values == 256
    blocks, flat = blocks.contiguous(), flat_rows(x)
    bias = None if bias is None else bias.contiguous()
    (m, k), n = flat.shape, len(blocks)
    y = x.new_empty((m, n))

    def launch_gemm(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        _block_gemm[grid(flat, n, block, splits)](
            flat, blocks, y if bias is None else bias, y, parts, m, n, k, flat.stride(0), blocks.shape[1], run,
            form == "Q6_K", bias is not None, splits > 1, block.tokens, block.rows, block.columns, **block.options(),
        )  # fmt: skip

    if m:
        with on(x):
            if m <= BLOCKS.most and x.dtype in HALVES:
                in_runs(flat, y, bias, BLOCKS, launch_gemm)
            else:
                by_slices(flat, y, bias, block_floats(blocks, form))
    return y.view(*x.shape[:-1], n)
