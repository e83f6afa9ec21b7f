"""Recomputes the sums of hopper_gemm_kernels.py that are not finite, from the dequantised weights one after another.

The fast kernel multiplies codes, and applies scales and offsets to the sums. So an infinite activation can meet a code
of zero that stands for a weight other than zero, and large sums can overflow float32 before a small scale is applied.
This file decides which of these results are infinite and which are NaN, as the reference has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accelpatch.kernels.triton.dequantize import _of_e4m3
from accelpatch.kernels.triton.gemm import leave


@triton.jit
def column_of(row, n, columns, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column of y of each of n rows in tiles; `columns`, where there is none. PART: see tiled.py."""
    if PART > 0:
        second = row % 16 // 8
        column = row // 16 * 8 + row % 8
        if PART == 1:
            result = tl.where(row < n, column + second * (n // 2), columns)
        else:
            result = tl.where((row < n) & (second == PART - 2), column, columns)
    else:
        result = row
    return result


@triton.jit
def places(w, rows, n, w_row, steps, sets, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of the rows' first codes, and indices of their first scales; rows beyond the last read the last."""
    if BITS == 4:
        clamped = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
        first = w + clamped // 16 * steps * 512 + clamped % 16 * 32
        at = (clamped // 16 * sets * 8 + clamped % 8) * 2 + clamped % 16 // 8
    else:
        clamped = tl.minimum(rows, n - 1)
        first = w + clamped * w_row
        at = clamped * sets
    return first, at


@triton.jit
def _code(first, step, place, BITS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of each row at a place of a step, in the order of `spread`, float32: a value of 8 bits, or 0 to 15."""
    if BITS == 8:
        column = place % 64 * 2 + place // 64
        byte = tl.load(first + step * 64 + column // 2) >> (column % 2 * 8)
        code = _of_e4m3(byte.to(tl.int32)) if KIND == 3 else byte.to(tl.int8, bitcast=False)
    else:
        nibble = place // 32
        code = ((tl.load(first + step * 512 + place % 32 // 2 * 2 + place % 2) >> (nibble * 4)) & 15) ^ 8
    return code.to(tl.float32)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    x_rows, first, scale, offset, at, begin, end, shift, ROWS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr
):
    """[R]: each row's dot product of x and the weights, from step `begin` to `end`."""
    SET: tl.constexpr = 16 if BITS == 4 else 1
    total = tl.zeros([ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=1):
        set_at = at + (step >> shift) * SET
        scales = tl.load(scale + set_at).to(tl.float32)
        offsets = tl.load(offset + set_at).to(tl.float32) if KIND == 1 or KIND == 2 else scales
        for place in tl.range(0, 128, num_stages=1):
            value = _code(first, step, place, BITS, KIND)
            if KIND == 2:
                value = value * scales + offsets
            elif KIND == 1:
                value = (value - offsets) * scales
            else:
                value = (value - (8.0 if BITS == 4 else 0.0)) * scales
            total += value * tl.load(x_rows + step * 128 + place).to(tl.float32)
    return total


@triton.jit
def by_values(  # type: ignore[no-untyped-def]
    x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token, start, split,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Recompute what `leave` has written, for TOKENS tokens from `token` on and ROWS rows from `start` on, where it is
    not finite. x[M, 128 * steps] is in the order of `spread`; KIND and PART are as in hopper_gemm.py.

    It takes one token at a time, and scalars: more at once would take registers from the fast path's products.
    """
    rows = start + tl.arange(0, ROWS)
    codes, at = places(w, rows, n, w_row, steps, sets, BITS)
    column = column_of(rows, n, columns, PART)
    for one in tl.range(token, tl.minimum(token + TOKENS, m), num_stages=1):
        of = column * 0 + one  # in 64 bits
        place = of * columns + column
        inside = column < columns
        if CUT:
            place += (column * 0 + split) * m * columns
            written = tl.load(parts + place, mask=inside, other=0.0)
        else:
            written = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(written) < float("inf")
        if tl.sum(finite.to(tl.int32), 0) < ROWS:
            recomputed = _sum(x + of * (steps * 128), codes, scale, offset, at, begin, end, shift, ROWS, BITS, KIND)
            if CUT:
                tl.store(parts + place, recomputed, mask=inside & (finite == 0))
            else:
                if BIAS:
                    recomputed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(y + place, recomputed.to(y.dtype.element_ty), mask=inside & (finite == 0))


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    total, x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token, start,
    split, ROWS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Store a program's sums total[ROWS, TOKENS] as `leave` does; those that are not finite come from `by_values`."""
    tokens, column = token + tl.arange(0, TOKENS), column_of(start + tl.arange(0, ROWS), n, columns, PART)
    zero = tl.sum(tl.sum(total - total, 1), 0)  # NaN, where a sum is not finite
    leave(total, bias, y, parts, tokens, column, m, columns, split, BIAS, CUT)
    if zero != 0.0:
        tl.debug_barrier()
        by_values(x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token,
                  start, split, ROWS, TOKENS, BITS, KIND, PART, BIAS, CUT)  # fmt: skip
