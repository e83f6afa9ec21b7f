"""GEMMs of int8 matrices with int32 accumulators and a fused epilogue; see ../ops/gemm_w8a8.py.

Many rows: tiles of A and B, whose products are the matrix units' own (wgmma on Hopper). Few rows: the weight's rows are
the M dimension of the matrix instruction, K is split where there are too few blocks for the GPU, and a second kernel
adds the splits' int32 sums and finishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.gated_activation import CODES, _activated
from accelpatch.kernels.triton.launch import cdiv, on, processors

LEAST_RUN = 512  # least length of a K split
GROUP = 8  # tiles of A's rows that run together, so that they read B's from L2


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program: rows of A, rows of B (columns of E), and K; its warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


#: (rows of A from which on it is used, tile), the largest first; measured on Hopper
TILES = ((1024, Tile(128, 256, 128, 8, 3)), (0, Tile(128, 128, 128, 8, 4)))
GATED = ((0, Tile(128, 128, 128, 8, 3)),)
AMD_TILES = ((0, Tile(128, 128, 64, 8, 2)),)
#: rows of A up to which it is used -> tile of a stream of B
STREAMS: Mapping[int, Tile] = MappingProxyType(
    {16: Tile(16, 64, 256, 4, 4), 32: Tile(32, 64, 256, 4, 4), 64: Tile(64, 64, 128, 4, 4)}
)
FEW_ROWS = max(STREAMS)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    c, e, row_scale, column_scale, d, correction, residual, alpha, beta, ms, ns, n, d_row, inside,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    """Store E of the int32 sums c at rows ms and columns ns, where `inside`."""
    if CORRECTED:
        c = c - tl.load(correction + ns, mask=inside, other=0)
    factor = alpha
    if ROW:
        factor = factor * tl.load(row_scale + ms, mask=inside, other=0.0)
    if COLUMN:
        factor = factor * tl.load(column_scale + ns, mask=inside, other=0.0)
    y = c.to(tl.float32)
    if D:
        beside = beta * tl.load(d + ms.to(tl.int64) * d_row + ns, mask=inside, other=0).to(tl.float32)
        y = tl.fma(y, tl.zeros_like(y) + factor, beside)
    else:
        y = y * factor
    if CODE >= 0:
        y = _activated(y, CODE)
    at = ms.to(tl.int64) * n + ns
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    if e.dtype.element_ty == tl.int8:
        y = tl.minimum(tl.maximum(y, -128.0), 127.0)
        tl.store(e + at, ((y + 12582912.0) - 12582912.0).to(tl.int8), mask=inside)  # + 1.5 * 2^23: to nearest even
    else:
        tl.store(e + at, y.to(e.dtype.element_ty), mask=inside)


@triton.jit
def _loaded(pointers, columns, k, EVEN: tl.constexpr, ACROSS: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:
        return tl.load(pointers)
    inside = columns < k
    return tl.load(pointers, mask=inside[None, :] if ACROSS else inside[:, None], other=0)


@triton.jit
def _place(m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of this program: rows of A and rows of B; some tiles of A's rows run together."""
    down, across = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group, place = tl.program_id(0) // (GROUP * across), tl.program_id(0) % (GROUP * across)
    rows = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + place % rows) * TILE_M, (place // rows) * TILE_N


@triton.jit(do_not_specialize=["m"])
def _tiles(  # type: ignore[no-untyped-def]
    a, b, e, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, k, a_row, b_row, d_row, d_batch,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    first_m, first_n = _place(m, n, TILE_M, TILE_N, GROUP)
    ms, ns, ks = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    a_tile = a + (batch * m + tl.minimum(ms, m - 1))[:, None] * a_row + ks[None, :]
    b_tile = b + (batch * n + tl.minimum(ns, n - 1))[None, :] * b_row + ks[:, None]
    c = tl.zeros([TILE_M, TILE_N], tl.int32)
    for at in tl.range(0, k, TILE_K):
        c = tl.dot(_loaded(a_tile, at + ks, k, EVEN, True), _loaded(b_tile, at + ks, k, EVEN, False), c)
        a_tile += TILE_K
        b_tile += TILE_K
    ms, ns = ms[:, None], ns[None, :]
    _finish(
        c, e + batch * m * n, row_scale, column_scale, d + batch * d_batch, correction, residual + batch * m * n,
        alpha, beta, ms, ns, n, d_row, (ms < m) & (ns < n), ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _gated(  # type: ignore[no-untyped-def]
    a, b, e, row_scale, column_scale, bias, m, n, k, a_row, b_row, BIAS: tl.constexpr, CODE: tl.constexpr,
    EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """E[m, n] = activation(A gate^T) * (A up^T), each rounded as by itself; B[2 n, k] is gate, then up."""
    first_m, first_n = _place(m, n, TILE_M, TILE_N, GROUP)
    ms, ns, ks = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    a_tile = a + tl.minimum(ms, m - 1).to(tl.int64)[:, None] * a_row + ks[None, :]
    b_tile = b + tl.minimum(ns, n - 1).to(tl.int64)[None, :] * b_row + ks[:, None]
    u_tile = b_tile + n * b_row.to(tl.int64)
    gate = tl.zeros([TILE_M, TILE_N], tl.int32)
    up = tl.zeros([TILE_M, TILE_N], tl.int32)
    for at in tl.range(0, k, TILE_K):
        x = _loaded(a_tile, at + ks, k, EVEN, True)
        gate = tl.dot(x, _loaded(b_tile, at + ks, k, EVEN, False), gate)
        up = tl.dot(x, _loaded(u_tile, at + ks, k, EVEN, False), up)
        a_tile += TILE_K
        b_tile += TILE_K
        u_tile += TILE_K
    held = tl.minimum(ns, n - 1)
    dtype: tl.constexpr = e.dtype.element_ty
    rows = tl.load(row_scale + tl.minimum(ms, m - 1))[:, None]
    opened = gate.to(tl.float32) * (rows * tl.load(column_scale + held)[None, :])
    other = up.to(tl.float32) * (rows * tl.load(column_scale + n + held)[None, :])
    if BIAS:
        opened += tl.load(bias + held).to(tl.float32)[None, :]
        other += tl.load(bias + n + held).to(tl.float32)[None, :]
    opened = _activated(opened.to(dtype).to(tl.float32), CODE).to(dtype).to(tl.float32)
    value = opened * other.to(dtype).to(tl.float32)
    at = ms.to(tl.int64)[:, None] * n + ns[None, :]
    tl.store(e + at, value.to(dtype), mask=(ms < m)[:, None] & (ns < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def _stream(  # type: ignore[no-untyped-def]
    a, b, e, parts, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, k, a_row, b_row, d_row, run,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, CUT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    ms, ks = tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    ns = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    a_tile = a + tl.minimum(ms, m - 1)[None, :] * a_row + ks[:, None]
    b_tile = b + tl.minimum(ns, n - 1).to(tl.int64)[:, None] * b_row + ks[None, :]
    c = tl.zeros([TILE_N, TILE_M], tl.int32)
    for at in tl.range(split * run, tl.minimum((split + 1) * run, k), TILE_K):
        columns = at + ks
        c = tl.dot(_loaded(b_tile + at, columns, k, EVEN, True), _loaded(a_tile + at, columns, k, EVEN, False), c)
    ms, ns = ms[None, :], ns[:, None]
    inside = (ms < m) & (ns < n)
    if CUT:
        tl.store(parts + split.to(tl.int64) * m * n + ms * n + ns, c, mask=inside)
    else:
        _finish(
            c, e, row_scale, column_scale, d, correction, residual, alpha, beta, ms, ns, n, d_row, inside,
            ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m", "splits"])
def _add_up(  # type: ignore[no-untyped-def]
    parts, e, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, d_row, splits,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = ns < n
    c = tl.zeros([SIZE], tl.int32)
    place = parts + row.to(tl.int64) * n + ns
    for _ in tl.range(splits):
        c += tl.load(place, mask=inside, other=0)
        place += m * n
    _finish(
        c, e, row_scale, column_scale, d, correction, residual, alpha, beta, row + tl.zeros_like(ns), ns, n, d_row,
        inside, ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
    )  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """What is behind the sums, as kernels take it; a tensor that is None has `e` in its place, and is not read."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, float]
    flags: tuple[Any, ...]
    d_row: int
    d_batch: int


def _epilogue(
    e: Tensor, alpha: float, row_scale: Tensor | None, column_scale: Tensor | None, d: Tensor | None, beta: float,
    correction: Tensor | None, activation: str, residual: Tensor | None,
) -> Epilogue:  # fmt: skip
    rows, columns = (None if one is None else one.to(torch.float32).contiguous() for one in (row_scale, column_scale))
    d, correction, residual = (None if one is None else one.contiguous() for one in (d, correction, residual))
    given = (rows, columns, d, correction, residual)
    matrix = d is not None and d.dim() > 1
    code = -1 if activation == "none" else CODES[activation]
    return Epilogue(
        tuple(e if one is None else one for one in given), (alpha, beta), (*(one is not None for one in given), code),
        e.shape[-1] if matrix else 0, e.shape[-2] * e.shape[-1] if matrix else 0,
    )  # fmt: skip


def gemm_w8a8(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """As the operation."""
    a, b, dtype = _rows(a), _rows(b), rest[-1]
    e = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)
    if e.numel():
        with on(a):
            streamed = a.dim() == 2 and a.shape[0] <= FEW_ROWS
            (_by_stream if streamed else _by_tiles)(a, b, e, _epilogue(e, *rest[:-1]))
    return e


def gated(a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
          dtype: torch.dtype) -> Tensor:  # fmt: skip
    """activation(first half of the columns) * second half of A[M, K] . B[N, K]^T with scales and bias: [M, N / 2]."""
    a, b = _rows(a), _rows(b)
    (m, k), n = a.shape, b.shape[0] // 2
    e = a.new_empty((m, n), dtype=dtype)
    if m:
        tile = next(one for least, one in GATED if m >= least)
        bias = None if bias is None else bias.contiguous()
        with on(a):
            _gated[(cdiv(m, tile.m) * cdiv(n, tile.n),)](
                a, b, e, row_scale.contiguous(), column_scale.contiguous(), e if bias is None else bias, m, n, k,
                a.stride(0), b.stride(0), bias is not None, CODES[activation], k % tile.k == 0,
                tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=_stages(tile),
            )  # fmt: skip
    return e


def _rows(matrix: Tensor) -> Tensor:
    """A matrix with contiguous rows; a batch wholly contiguous. Copied only where needed."""
    fits = matrix.is_contiguous() if matrix.dim() == 3 else matrix.stride(1) == 1
    return matrix if fits else matrix.contiguous()


def _stages(tile: Tile) -> int:
    return 2 if torch.version.hip else tile.stages  # LDS holds less


def _by_tiles(a: Tensor, b: Tensor, e: Tensor, epilogue: Epilogue) -> None:
    (m, k), n, batch = a.shape[-2:], b.shape[-2], a.shape[0] if a.dim() == 3 else 1
    tile = next(one for least, one in (AMD_TILES if torch.version.hip else TILES) if m >= least)
    _tiles[(cdiv(m, tile.m) * cdiv(n, tile.n), batch)](
        a, b, e, *epilogue.tensors, *epilogue.numbers, m, n, k, a.stride(-2), b.stride(-2), epilogue.d_row,
        epilogue.d_batch, *epilogue.flags, k % tile.k == 0, tile.m, tile.n, tile.k, GROUP,
        num_warps=tile.warps, num_stages=_stages(tile),
    )  # fmt: skip


def _by_stream(a: Tensor, b: Tensor, e: Tensor, epilogue: Epilogue) -> None:
    (m, k), n = a.shape, b.shape[0]
    tile = next(one for most, one in STREAMS.items() if m <= most)
    blocks = cdiv(n, tile.n)
    runs = max(1, min(2 * processors(a.device) // blocks, k // LEAST_RUN, 8))
    run = cdiv(k, runs * tile.k) * tile.k
    splits = cdiv(k, run)
    parts = a.new_empty((splits, m, n), dtype=torch.int32) if splits > 1 else e
    _stream[(blocks, splits)](
        a, b, e, parts, *epilogue.tensors, *epilogue.numbers, m, n, k, a.stride(0), b.stride(0), epilogue.d_row, run,
        *epilogue.flags, k % tile.k == 0, splits > 1, tile.m, tile.n, tile.k,
        num_warps=tile.warps, num_stages=_stages(tile),
    )  # fmt: skip
    if splits > 1:
        _add_up[(m, cdiv(n, 1024))](
            parts, e, *epilogue.tensors, *epilogue.numbers, m, n, epilogue.d_row, splits, *epilogue.flags, 1024
        )
