"""Device code of GEMMs of 8 bits with a fused epilogue; launched by gemm_w8a8.py.

FLOAT: 0 for int8, whose sums are int32 and exact. Of 8-bit floats the sums are float32; Hopper's matrix unit adds up
with fewer bits, and so FLOAT products at a time (-1: all of K), whose sum then goes into the float32 one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accelpatch.kernels.triton.gated_activation import _activated
from accelpatch.kernels.triton.gemm import _some


@triton.jit
def _dot(x, w, c, FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """c + x w."""
    if FLOAT == 0:
        c = tl.dot(x, w, c, out_dtype=tl.int32)
    elif FLOAT > 0:
        c = tl.dot(x, w, c, max_num_imprecise_acc=FLOAT)
    else:
        c = tl.dot(x, w, c)
    return c


@triton.jit
def _value(  # type: ignore[no-untyped-def]
    c, row_scale, column_scale, d, correction, residual, alpha, beta, ms, ns, m, n, d_row,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    """E, in float32, of the sums c at rows ms and columns ns; vectors are read once a row or column. D: 1 for a vector,
    2 for a matrix."""
    inside = (ms < m) & (ns < n)
    if CORRECTED:
        c = c - tl.load(correction + ns, mask=ns < n, other=0)
    factor = alpha
    if ROW:
        factor = factor * tl.load(row_scale + ms, mask=ms < m, other=0.0)
    if COLUMN:
        factor = factor * tl.load(column_scale + ns, mask=ns < n, other=0.0)
    y = c.to(tl.float32)
    if D > 0:
        if D == 1:
            addend = tl.load(d + ns, mask=ns < n, other=0).to(tl.float32) + tl.zeros_like(y)
        else:
            addend = tl.load(d + ms.to(tl.int64) * d_row + ns, mask=inside, other=0).to(tl.float32)
        y = tl.fma(y, tl.zeros_like(y) + factor, beta * addend)
    else:
        y = y * factor
    if CODE >= 0:
        y = _activated(y, CODE)
    if RESIDUAL:
        y += tl.load(residual + ms.to(tl.int64) * n + ns, mask=inside, other=0).to(tl.float32)
    return y


@triton.jit
def _rounded(y, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """y in E's dtype: int8 saturates, to nearest even by adding and taking off 1.5 * 2^23."""
    if tl.int8 == DTYPE:
        y = tl.minimum(tl.maximum(y, -128.0), 127.0)
        y = (y + 12582912.0) - 12582912.0
    return y.to(DTYPE)


@triton.jit
def _place(tile, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first row of A and of B in a tile, by its number; some tiles of A's rows run together."""
    down, across = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group, place = tile // (GROUP * across), tile % (GROUP * across)
    rows = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + place % rows) * TILE_M, (place // rows) * TILE_N


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    c, out, e, row_scale, column_scale, d, correction, residual, alpha, beta, first_m, first_n, m, n, batch, d_row,
    d_batch, ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr,
    RESIDUAL: tl.constexpr, CODE: tl.constexpr, TMA: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Write E's tile of the sums c."""
    ms, ns = (first_m + tl.arange(0, TILE_M))[:, None], (first_n + tl.arange(0, TILE_N))[None, :]
    y = _value(
        c, row_scale, column_scale, d + batch * d_batch, correction, residual + batch * m * n, alpha, beta, ms, ns,
        m, n, d_row, ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
    )  # fmt: skip
    y = _rounded(y, e.dtype.element_ty)
    if TMA:  # a tile's rows as whole lines
        out.store([first_m, first_n], y)
    else:
        tl.store(e + (batch * m + ms) * n + ns, y, mask=(ms < m) & (ns < n))


@triton.jit(do_not_specialize=["m"])
def tiles(  # type: ignore[no-untyped-def]
    a, b, out, e, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, k, a_row, b_row, d_row, d_batch,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr = 0,
):  # fmt: skip
    """By TMA a program takes every num_programs-th tile, and loads the next one while it finishes one."""
    batch = tl.program_id(1).to(tl.int64)
    zero: tl.constexpr = tl.float32 if FLOAT else tl.int32
    if TMA:
        programs = tl.num_programs(0)
        done = tl.program_id(0) - programs  # counted apart from `tile`, which the loads of the next tile depend on
        for tile in tl.range(tl.program_id(0), tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N), programs, flatten=True):
            first_m, first_n = _place(tile, m, n, TILE_M, TILE_N, GROUP)
            c = tl.zeros([TILE_M, TILE_N], zero)
            for at in tl.range(0, k, TILE_K):
                c = _dot(a.load([first_m, at]), b.load([first_n, at]).T, c, FLOAT)
            done += programs
            first_m, first_n = _place(done, m, n, TILE_M, TILE_N, GROUP)
            _finish(
                c, out, e, row_scale, column_scale, d, correction, residual, alpha, beta, first_m, first_n, m, n, batch,
                d_row, d_batch, ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE, True, TILE_M, TILE_N,
            )  # fmt: skip
    else:
        first_m, first_n = _place(tl.program_id(0), m, n, TILE_M, TILE_N, GROUP)
        ms, ns, ks = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
        a_tile = a + (batch * m + tl.minimum(ms, m - 1))[:, None] * a_row + ks[None, :]
        b_tile = b + (batch * n + tl.minimum(ns, n - 1))[None, :] * b_row + ks[:, None]
        c = tl.zeros([TILE_M, TILE_N], zero)
        for at in tl.range(0, k, TILE_K):
            x, w = _some(a_tile, at + ks, k, EVEN, True), _some(b_tile, at + ks, k, EVEN, False)
            c = _dot(x, w, c, FLOAT)
            a_tile += TILE_K
            b_tile += TILE_K
        _finish(
            c, out, e, row_scale, column_scale, d, correction, residual, alpha, beta, first_m, first_n, m, n, batch,
            d_row, d_batch, ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE, False, TILE_M, TILE_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def gated(  # type: ignore[no-untyped-def]
    a, b, out, e, row_scale, column_scale, bias, m, n, k, a_row, b_row, BIAS: tl.constexpr, CODE: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr = 0,
):  # fmt: skip
    """E[m, n] = activation(A gate^T) * (A up^T), each rounded as by itself; B[2 n, k] is gate, then up.

    By TMA a tile's rows of gate and up come as one operand, of [2, n, k], and its sums are taken apart behind the loop.
    """
    first_m, first_n = _place(tl.program_id(0), m, n, TILE_M, TILE_N, GROUP)
    ms, ns, ks = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    if TMA:
        both = tl.zeros([TILE_M, 2 * TILE_N], tl.float32 if FLOAT else tl.int32)
        for at in tl.range(0, k, TILE_K):
            w = tl.reshape(b.load([0, first_n, at]), (2 * TILE_N, TILE_K))
            both = _dot(a.load([first_m, at]), w.T, both, FLOAT)
        gate, up = tl.split(tl.permute(tl.reshape(both, (TILE_M, 2, TILE_N)), (0, 2, 1)))
    else:
        a_tile = a + tl.minimum(ms, m - 1).to(tl.int64)[:, None] * a_row + ks[None, :]
        b_tile = b + tl.minimum(ns, n - 1).to(tl.int64)[None, :] * b_row + ks[:, None]
        u_tile = b_tile + n * b_row.to(tl.int64)
        gate = tl.zeros([TILE_M, TILE_N], tl.float32 if FLOAT else tl.int32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32 if FLOAT else tl.int32)
        for at in tl.range(0, k, TILE_K):
            x = _some(a_tile, at + ks, k, EVEN, True)
            gate = _dot(x, _some(b_tile, at + ks, k, EVEN, False), gate, FLOAT)
            up = _dot(x, _some(u_tile, at + ks, k, EVEN, False), up, FLOAT)
            a_tile += TILE_K
            b_tile += TILE_K
            u_tile += TILE_K
    value = _opened(gate, up, e, row_scale, column_scale, bias, ms, ns, m, n, BIAS, CODE)
    if TMA:
        out.store([first_m, first_n], value)
    else:
        at = ms.to(tl.int64)[:, None] * n + ns[None, :]
        tl.store(e + at, value, mask=(ms < m)[:, None] & (ns < n)[None, :])


@triton.jit
def _opened(  # type: ignore[no-untyped-def]
    gate, up, e, row_scale, column_scale, bias, ms, ns, m, n, BIAS: tl.constexpr, CODE: tl.constexpr
):
    """activation(gate) * up of sums, with their scales and bias, each rounded to E's dtype as by itself."""
    clamped = tl.minimum(ns, n - 1)
    dtype: tl.constexpr = e.dtype.element_ty
    rows = tl.load(row_scale + tl.minimum(ms, m - 1))[:, None]
    opened = gate.to(tl.float32) * (rows * tl.load(column_scale + clamped)[None, :])
    other = up.to(tl.float32) * (rows * tl.load(column_scale + n + clamped)[None, :])
    if BIAS:
        opened += tl.load(bias + clamped).to(tl.float32)[None, :]
        other += tl.load(bias + n + clamped).to(tl.float32)[None, :]
    opened = _activated(opened.to(dtype).to(tl.float32), CODE).to(dtype).to(tl.float32)
    return (opened * other.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["m"])
def stream(  # type: ignore[no-untyped-def]
    a, b, e, parts, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, k, a_row, b_row, d_row, run,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, CUT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, FLOAT: tl.constexpr = 0,
):  # fmt: skip
    split = tl.program_id(1)
    ms, ks = tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    ns = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    a_tile = a + tl.minimum(ms, m - 1)[None, :] * a_row + ks[:, None]
    b_tile = b + tl.minimum(ns, n - 1).to(tl.int64)[:, None] * b_row + ks[None, :]
    c = tl.zeros([TILE_N, TILE_M], tl.float32 if FLOAT else tl.int32)
    for at in tl.range(split * run, tl.minimum((split + 1) * run, k), TILE_K):
        columns = at + ks
        w, x = _some(b_tile + at, columns, k, EVEN, True), _some(a_tile + at, columns, k, EVEN, False)
        c = _dot(w, x, c, FLOAT)
    ms, ns = ms[None, :], ns[:, None]
    inside = (ms < m) & (ns < n)
    if CUT:
        tl.store(parts + split.to(tl.int64) * m * n + ms * n + ns, c, mask=inside)
    else:
        y = _value(
            c, row_scale, column_scale, d, correction, residual, alpha, beta, ms, ns, m, n, d_row,
            ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
        )  # fmt: skip
        tl.store(e + ms.to(tl.int64) * n + ns, _rounded(y, e.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "splits"])
def add_up(  # type: ignore[no-untyped-def]
    parts, e, row_scale, column_scale, d, correction, residual, alpha, beta, m, n, d_row, splits,
    ROW: tl.constexpr, COLUMN: tl.constexpr, D: tl.constexpr, CORRECTED: tl.constexpr, RESIDUAL: tl.constexpr,
    CODE: tl.constexpr, SIZE: tl.constexpr, FLOAT: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(0)
    ns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = ns < n
    c = tl.zeros([SIZE], tl.float32 if FLOAT else tl.int32)
    place = parts + row.to(tl.int64) * n + ns
    for _ in tl.range(splits):
        c += tl.load(place, mask=inside, other=0)
        place += m * n
    ms = row + tl.zeros_like(ns)
    y = _value(
        c, row_scale, column_scale, d, correction, residual, alpha, beta, ms, ns, m, n, d_row,
        ROW, COLUMN, D, CORRECTED, RESIDUAL, CODE,
    )  # fmt: skip
    tl.store(e + row.to(tl.int64) * n + ns, _rounded(y, e.dtype.element_ty), mask=inside)
