"""GEMMs for some rows of x with a row-major float or int8 weight; see ops/linear/float_linear.py
and int8_linear.py.

The kernel converts a block of the weight to x's dtype in registers; the weight's rows are the M dimension of the matrix
instruction. Where there are too few blocks for the GPU, K is split and a second kernel reduces the splits in a fixed
order. On Hopper the float GEMM and the reduction use programmatic dependent launch; for int8 it was slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.tiling import TILE_VALUES
from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import cdiv, dependent, on

LEAST_RUN = 512  # least length of a K split


@dataclass(frozen=True)
class Block:
    """Tile sizes of a program: `tokens` rows of x, `rows` of the weight, `columns` of K at a time."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        stages = 2 if torch.version.hip else self.stages  # AMD's LDS has room for fewer
        return {"num_warps": self.warps, "num_stages": stages}


@dataclass(frozen=True)
class Blocks:
    """Tile sizes to choose from. of: the first with enough tokens is used, else the last.

    most: up to this many rows of x this kernel was faster than the alternative. programs: the least that fill the GPU
    it was measured on, which has 132 SMs.
    """

    of: tuple[Block, ...]
    most: int = 64
    programs: int = 264


FLOAT = Blocks((Block(16, 64, 128, 4, 3), Block(32, 64, 128, 4, 3), Block(64, 64, 128, 4, 3)), programs=132)
FLOAT_CUT = Blocks((Block(16, 64, 128, 4, 6), Block(32, 64, 128, 4, 6), Block(64, 64, 128, 4, 6)), programs=132)
FLOAT_GATE = Blocks((Block(16, 128, 64, 4, 4), Block(32, 128, 64, 4, 4), Block(64, 128, 64, 4, 4)), programs=132)
INT8 = Blocks(
    (Block(16, 64, 128, 4, 4), Block(32, 64, 128, 4, 4), Block(64, 64, 128, 4, 4), Block(128, 64, 64, 4, 4)), 256
)


@triton.jit
def leave(  # type: ignore[no-untyped-def]
    total, bias, y, parts, tokens, rows, m, n, split, BIAS: tl.constexpr, CUT: tl.constexpr
):
    """Store a program's sums [rows, tokens] in y, or in its split's part of `parts`."""
    inside = (rows < n)[:, None] & (tokens < m)[None, :]
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    if not CUT:
        if BIAS:
            total += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + split.to(tl.int64) * m * n + place, total, mask=inside)


@triton.jit
def _some(pointers, columns, k, EVEN: tl.constexpr, ACROSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load columns of some rows; 0 beyond the end of K."""
    if EVEN:
        return tl.load(pointers)
    inside = columns < k
    mask = inside[None, :] if ACROSS else inside[:, None]
    return tl.load(pointers, mask=mask, other=0 if pointers.dtype.element_ty == tl.int8 else 0.0)


@triton.jit(do_not_specialize=["m"])
def _gemm(  # type: ignore[no-untyped-def]
    x, w, scale, bias, y, parts, m, n, k, x_stride, run,
    SCALED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # programs that share weight rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    clamped = tl.minimum(rows, n - 1)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * x_stride
    w_rows = w + clamped[:, None] * k
    u_rows = w + (clamped + n)[:, None] * k  # the rows of up, whose product the activated gate multiplies
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    other = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(split * run, tl.minimum((split + 1) * run, k), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        weights = _some(w_rows + columns[None, :], columns, k, EVEN, True)
        x_tile = _some(x_rows + columns[:, None], columns, k, EVEN, False)
        total = tl.dot(weights.to(x.dtype.element_ty), x_tile, total)
        if GATE:
            others = _some(u_rows + columns[None, :], columns, k, EVEN, True)
            other = tl.dot(others.to(x.dtype.element_ty), x_tile, other)
    if SCALED:
        total = total * tl.load(scale + clamped).to(tl.float32)[:, None]
    if GATE:  # gate and up are each rounded to y's dtype first, as two linear layers would round them
        if SCALED:
            other = other * tl.load(scale + n + clamped).to(tl.float32)[:, None]
        if BIAS:
            total += tl.load(bias + clamped).to(tl.float32)[:, None]
            other += tl.load(bias + n + clamped).to(tl.float32)[:, None]
        gate = total.to(y.dtype.element_ty).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
        total = opened * other.to(y.dtype.element_ty).to(tl.float32)
    leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS and not GATE, CUT)


@triton.jit(do_not_specialize=["splits"])
def _add_up(  # type: ignore[no-untyped-def]
    parts, bias, y, count, n, splits, BIAS: tl.constexpr, DEPENDENT: tl.constexpr, SIZE: tl.constexpr
):
    overlap(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    total = tl.zeros([SIZE], tl.float32)
    place = parts + at
    for _ in tl.range(splits):
        total += tl.load(place, mask=inside, other=0.0)
        place += count
    if BIAS:
        total += tl.load(bias + at % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


Launch = Callable[[Block, int, int, Tensor, Tensor], None]


def in_runs(
    x: Tensor, y: Tensor, bias: Tensor | None, blocks: Blocks, launch_gemm: Launch, *, one_run: bool = False
) -> None:
    """y[M, N] of x[M, K] by launch_gemm(block, run, splits, y, parts). K is split where blocks are few, unless one_run:
    then a block computes its sums over the whole of K."""
    (m, k), n = x.shape, y.shape[1]
    block = next((one for one in blocks.of if one.tokens >= m), blocks.of[-1])
    programs = cdiv(m, block.tokens) * cdiv(n, block.rows)
    runs = 1 if one_run else max(1, min(blocks.programs // programs, k // LEAST_RUN, 8))
    step = max(TILE_VALUES, block.columns)
    run = cdiv(k, runs * step) * step
    splits = cdiv(k, run)
    parts = y if splits == 1 else y.new_empty((splits, m, n), dtype=torch.float32)
    launch_gemm(block, run, splits, y, parts)
    if splits > 1:
        overlapped, options = dependent(x)
        _add_up[(cdiv(m * n, 1024),)](
            parts, y if bias is None else bias, y, m * n, n, splits, bias is not None, overlapped, 1024, **options
        )


def grid(x: Tensor, n: int, block: Block, splits: int) -> tuple[int, int]:
    """Number of programs: along tokens and weight rows, and along K."""
    return cdiv(x.shape[0], block.tokens) * cdiv(n, block.rows), splits


def flat_rows(x: Tensor) -> Tensor:
    """[M, K] with contiguous rows; copied only where needed."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def floats(n: int, gate: bool) -> Blocks:
    """The Blocks for float weights and n columns of y."""
    if gate:
        return FLOAT_GATE
    return FLOAT_CUT if cdiv(n, FLOAT.of[0].rows) * 2 <= FLOAT.programs else FLOAT


def linear(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None, gate: bool = False) -> Tensor:
    """x[..., K] @ (w[N, K] * scale[N, 1])^T + bias[N], contiguous. gate: silu(first half) * second half of its columns.

    w and scale contiguous; x and a float w of one dtype of HALVES.
    """
    x_rows, bias = flat_rows(x), None if bias is None else bias.contiguous()
    (m, k), n = x_rows.shape, w.shape[0] // 2 if gate else w.shape[0]
    y, (overlapped, options) = x.new_empty((m, n)), dependent(x) if scale is None else (False, {})

    def launch_gemm(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        _gemm[grid(x_rows, n, block, splits)](
            x_rows, w, y if scale is None else scale, y if bias is None else bias, y, parts, m, n, k,
            x_rows.stride(0), run, scale is not None, gate, bias is not None, splits > 1, k % block.columns == 0,
            overlapped, block.tokens, block.rows, block.columns, **block.options(), **options,
        )  # fmt: skip

    with on(x):
        in_runs(x_rows, y, bias, INT8 if scale is not None else floats(n, gate), launch_gemm, one_run=gate)
    return y.view(*x.shape[:-1], n)
