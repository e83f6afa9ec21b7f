"""Products of rows of experts' weights with one token; see experts.py.

4-bit codes: the bits of a code, in their place in the word, are or-ed into those of the float 2^23, from which 2^23 is
then subtracted: the code times a power of two, by which x is divided beforehand, exactly. Those of e2m1 are read as
float16, and their scales' bits are the exponents of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accelpatch.kernels.triton.dequantize import _of_e2m1, _of_e4m3


@triton.jit
def _scaled_codes(words, x, power, NIBBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in a nibble of each word times x, float32."""
    PLACE: tl.constexpr = NIBBLE if NIBBLE < 5 else NIBBLE - 3  # the 23 bits of a fraction have room for five nibbles
    shifted = words if NIBBLE < 5 else words >> 12
    bits = (shifted & (15 << (4 * PLACE))) | power
    return (bits.to(tl.float32, bitcast=True) - 8388608.0) * (x * (1.0 / (1 << (4 * PLACE))))


@triton.jit
def _factor(scale, valid, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales at these addresses, float32; of e2m1 from exponents, or in tiles from the bits of bfloat16; of
    NVFP4 from bytes of e4m3."""
    if OFFSET == 3:
        return _of_e4m3(tl.load(scale, mask=valid, other=0).to(tl.int32))
    if OFFSET != 2:
        return tl.load(scale, mask=valid, other=0.0).to(tl.float32)
    bits = tl.load(scale, mask=valid, other=0).to(tl.int32)
    bits = tl.where(bits == 0, 1 << 22, bits << 23) if scale.dtype.element_ty == tl.uint8 else bits << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    w, scale, offset, x, rows, block, valid, k, groups, power,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Blocks of rows of 4-bit codes times x: float32 [ROWS, BLOCKS].

    x: pointer to the row of x, or [BLOCKS]. rows[ROWS, BLOCKS] int64: numbers of rows in the whole stack. block[BLOCKS]
    of those rows. A warp has 8 blocks of all rows, so that a thread has the values of x that its own words multiply.
    """
    word = tl.arange(0, 16)[None, None, :]
    first = (rows * tl.cdiv(k, 128) + block[None, :]) * 16
    words = tl.load(w + first[:, :, None] + word, mask=valid[:, :, None], other=0)
    total = tl.zeros([ROWS, BLOCKS], tl.float32)
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    for part in tl.static_range(PARTS):
        group = tl.minimum(block * PARTS + part if GROUP < 128 else block * 128 // GROUP, groups - 1)
        at = rows * groups + group[None, :]
        factor = _factor(scale + at, valid, OFFSET)
        sums = tl.zeros([ROWS, BLOCKS, 16], tl.float32)
        given = tl.zeros([1, BLOCKS, 16], tl.float32)
        for one in tl.static_range(8 // PARTS):
            column = block[None, :, None] * 128 + 16 * (part * (8 // PARTS) + one) + word
            value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
            if OFFSET >= 2:
                sums += _of_e2m1(words >> (4 * (part * (8 // PARTS) + one))) * value
            else:
                given += value
                sums += _scaled_codes(words, value, power, part * (8 // PARTS) + one)
        if OFFSET >= 2:
            total += tl.sum(sums, axis=2) * 16384.0 * factor
        elif OFFSET == 1:
            minimum = tl.load(offset + at, mask=valid, other=0.0).to(tl.float32)
            total += tl.sum(sums, axis=2) * factor + tl.sum(given, axis=2) * minimum
        else:
            total += (tl.sum(sums, axis=2) - 8.0 * tl.sum(given, axis=2)) * factor
    if OFFSET == 3:
        total = total * tl.load(offset + rows, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit
def _fp8_sums(  # type: ignore[no-untyped-def]
    w, scale, x, rows, inside, k, groups, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """w[rows] . x of bytes of e4m3 with a scale for each 128, float32 [ROWS]. rows: as in _row_sums."""
    total, column = tl.zeros([ROWS, BLOCKS], tl.float32), tl.arange(0, 128)
    for start in range(0, groups, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        there = inside[:, None] & (block < groups)[None, :]
        place = block[:, None] * 128 + column[None, :]
        x_values = tl.load(x + place, mask=(block < groups)[:, None], other=0.0).to(tl.float32)
        codes = tl.load(w + rows[:, None, None] * k + place[None, :, :], mask=there[:, :, None], other=0)
        sums = tl.sum(_of_e4m3(codes.to(tl.int32)) * x_values[None, :, :], axis=2)
        total += sums * tl.load(scale + rows[:, None] * groups + block[None, :], mask=there, other=0.0)
    return tl.sum(total, axis=1)


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    w, scale, x, rows, inside, k, groups, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """w[rows] . x of floats, int8 or e4m3, float32 [ROWS]. rows: int64 numbers of rows in the whole stack."""
    if KIND == 3:
        return _fp8_sums(w, scale, x, rows, inside, k, groups, ROWS, COLUMNS // 128)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, COLUMNS):
        # Runs of 8 values of x and of the weights, so that a thread loads the same columns of both.
        column = tl.max_contiguous(start + tl.arange(0, COLUMNS), 8)[None, :]
        given = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
        there = inside[:, None] & (column < k)
        values = tl.load(w + rows[:, None] * k + column, mask=there, other=0)
        sums += values.to(tl.float32) * given
    made = tl.sum(sums, axis=1)
    if KIND == 1:
        made *= tl.load(scale + rows, mask=inside, other=0.0).to(tl.float32)
    return made
