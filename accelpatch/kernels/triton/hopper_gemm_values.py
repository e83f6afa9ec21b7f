"""Sums of hopper_gemm_kernels.py that are not finite, once more: by the values of the weight, one after the other.

There the products are those of codes, and what a code is less its value comes behind them: infinite activations meet
codes of zero, whose weights are none, and large ones leave float32 before a small scale is applied. What is infinite,
and what is NaN, is decided here.
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
            found = tl.where(row < n, column + second * (n // 2), columns)
        else:
            found = tl.where((row < n) & (second == PART - 2), column, columns)
    else:
        found = row
    return found


@triton.jit
def places(w, rows, n, w_row, steps, sets, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows, or the last one there is: addresses of their first codes, and places of their first scales."""
    if BITS == 4:
        held = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
        first = w + held // 16 * steps * 512 + held % 16 * 32
        at = (held // 16 * sets * 8 + held % 8) * 2 + held % 16 // 8
    else:
        held = tl.minimum(rows, n - 1)
        first = w + held * w_row
        at = held * sets
    return first, at


@triton.jit
def _code(first, step, place, BITS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """What lies at a place of a step (in the order of `spread`), of all rows, float32: a value of 8 bits or 0 to 15."""
    if BITS == 8:
        column = place % 64 * 2 + place // 64
        held = tl.load(first + step * 64 + column // 2) >> (column % 2 * 8)
        found = _of_e4m3(held.to(tl.int32)) if KIND == 3 else held.to(tl.int8, bitcast=False)
    else:
        even = place // 32
        found = ((tl.load(first + step * 512 + place % 32 // 2 * 2 + place % 2) >> (even * 4)) & 15) ^ 8
    return found.to(tl.float32)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    x_rows, first, scale, offset, at, begin, end, shift, ROWS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr
):
    """[R]: of all rows the sum of x times weights, from step `begin` to `end`."""
    SET: tl.constexpr = 16 if BITS == 4 else 1
    found = tl.zeros([ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=1):
        of = at + (step >> shift) * SET
        factor = tl.load(scale + of).to(tl.float32)
        beside = tl.load(offset + of).to(tl.float32) if KIND == 1 or KIND == 2 else factor
        for place in tl.range(0, 128, num_stages=1):
            value = _code(first, step, place, BITS, KIND)
            if KIND == 2:
                value = value * factor + beside
            elif KIND == 1:
                value = (value - beside) * factor
            else:
                value = (value - (8.0 if BITS == 4 else 0.0)) * factor
            found += value * tl.load(x_rows + step * 128 + place).to(tl.float32)
    return found


@triton.jit
def by_values(  # type: ignore[no-untyped-def]
    x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token, start, split,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """What `leave` has written for TOKENS tokens from `token` on and ROWS rows from `start` on, once more where it is
    not finite. x[M, 128 * steps] is in the order of `spread`; KIND and PART are as in hopper_gemm.py.

    One token after the other, and by scalars: more at once would take registers from the products.
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
            held = tl.load(parts + place, mask=inside, other=0.0)
        else:
            held = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(held) < float("inf")
        if tl.sum(finite.to(tl.int32), 0) < ROWS:
            found = _sum(x + of * (steps * 128), codes, scale, offset, at, begin, end, shift, ROWS, BITS, KIND)
            if CUT:
                tl.store(parts + place, found, mask=inside & (finite == 0))
            else:
                if BIAS:
                    found += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(y + place, found.to(y.dtype.element_ty), mask=inside & (finite == 0))


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    total, x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token, start,
    split, ROWS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Write a program's sums total[ROWS, TOKENS] as `leave` does, and those that are not finite `by_values`."""
    tokens, column = token + tl.arange(0, TOKENS), column_of(start + tl.arange(0, ROWS), n, columns, PART)
    zero = tl.sum(tl.sum(total - total, 1), 0)  # NaN, where a sum is not finite
    leave(total, bias, y, parts, tokens, column, m, columns, split, BIAS, CUT)
    if zero != 0.0:
        tl.debug_barrier()
        by_values(x, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, token,
                  start, split, ROWS, TOKENS, BITS, KIND, PART, BIAS, CUT)  # fmt: skip
