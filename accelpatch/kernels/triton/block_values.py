"""Values of GGUF's blocks in Triton: of value i of the block that begins at an address (layouts/gguf_blocks.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from accelpatch.kernels.triton.dequantize import _pick

#: what kernels call FORM: the bytes of a block, but of IQ4_NL, whose are those of Q4_0
FORMS = {
    "Q5_0": 22, "Q5_1": 24, "IQ4_NL": 18, "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
    "IQ4_XS": 136,
}  # fmt: skip


@triton.jit
def _half(at):  # type: ignore[no-untyped-def]
    """The float16 in two bytes, float32."""
    bits = tl.load(at).to(tl.int16) | (tl.load(at + 1).to(tl.int16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(at):  # type: ignore[no-untyped-def]
    return tl.load(at).to(tl.int32)


@triton.jit
def _nibble(start, i):  # type: ignore[no-untyped-def]
    """Of 16 bytes, the low nibbles of which are the first 16 of 32 values."""
    return (_byte(start + i % 16) >> (i % 32 // 16 * 4)) & 15


@triton.jit
def _book(code):  # type: ignore[no-untyped-def]
    """What the codes of IQ4_NL and IQ4_XS stand for."""
    low = tl.where((code & 4) != 0, _pick(code, -49, -35, -22, -10), _pick(code, -127, -104, -83, -65))
    high = tl.where((code & 4) != 0, _pick(code, 53, 69, 89, 113), _pick(code, 1, 13, 25, 38))
    return tl.where((code & 8) != 0, high, low).to(tl.float32)


@triton.jit
def _q5(base, i, MINIMUM: tl.constexpr):  # type: ignore[no-untyped-def]
    start = base + (4 if MINIMUM else 2)
    code = _nibble(start + 4, i) | (((_byte(start + i // 8) >> (i % 8)) & 1) << 4)
    if MINIMUM:
        return _half(base) * code.to(tl.float32) + _half(base + 2)
    return _half(base) * (code - 16).to(tl.float32)


@triton.jit
def _q2_k(base, i):  # type: ignore[no-untyped-def]
    code = (_byte(base + 16 + i // 128 * 32 + i % 32) >> (i % 128 // 32 * 2)) & 3
    both = _byte(base + i // 16)
    scale, minimum = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
    return (_half(base + 80) * scale) * code.to(tl.float32) - _half(base + 82) * minimum


@triton.jit
def _q3_k(base, i):  # type: ignore[no-untyped-def]
    code = (_byte(base + 32 + i // 128 * 32 + i % 32) >> (i % 128 // 32 * 2)) & 3
    high = (_byte(base + i % 32) >> (i // 32)) & 1
    j = i // 16
    low = (_byte(base + 96 + j % 8) >> (j // 8 * 4)) & 15
    scale = (low | (((_byte(base + 104 + j % 4) >> (j // 4 * 2)) & 3) << 4)) - 32
    return (_half(base + 108) * scale.to(tl.float32)) * (code - 4 + 4 * high).to(tl.float32)


@triton.jit
def _six_bits(base, j):  # type: ignore[no-untyped-def]
    """Scale and minimum of group j of eight, of the blocks of Q4_K and Q5_K."""
    s = base + 4 + j % 4
    first, behind, late = _byte(s), _byte(s + 4), _byte(s + 8)
    scale = tl.where(j < 4, first & 63, (late & 15) | ((first >> 6) << 4)).to(tl.float32)
    return scale, tl.where(j < 4, behind & 63, (late >> 4) | ((behind >> 6) << 4)).to(tl.float32)


@triton.jit
def _q45_k(base, i, FIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    j = i // 32
    scale, minimum = _six_bits(base, j)
    code = (_byte(base + (48 if FIVE else 16) + i // 64 * 32 + i % 32) >> (j % 2 * 4)) & 15
    if FIVE:
        code = code | (((_byte(base + 16 + i % 32) >> j) & 1) << 4)
    return (_half(base) * scale) * code.to(tl.float32) - _half(base + 2) * minimum


@triton.jit
def _q6_k(base, i):  # type: ignore[no-untyped-def]
    half, place = i // 128, i % 128
    low = _byte(base + 64 * half + place % 64) >> (place // 64 * 4)
    high = _byte(base + 128 + 32 * half + place % 32) >> (place // 32 * 2)
    code = (low & 15) | ((high & 3) << 4)
    scale = tl.load(base + 192 + i // 16).to(tl.int8, bitcast=True).to(tl.float32)
    return (_half(base + 208) * scale) * (code - 32).to(tl.float32)


@triton.jit
def _iq4_xs(base, i):  # type: ignore[no-untyped-def]
    j = i // 32
    low = (_byte(base + 4 + j // 2) >> (j % 2 * 4)) & 15
    scale = (low | (((_byte(base + 2 + j // 4) >> (j % 4 * 2)) & 3) << 4)) - 32
    return (_half(base) * scale.to(tl.float32)) * _book(_nibble(base + 8 + j * 16, i))


@triton.jit
def block_values(rows, columns, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """w[rows, columns], float32. rows: addresses of rows, [R, 1]; columns: [1, C]. FORM: of FORMS."""
    if FORM < 40:
        base, i = rows + columns // 32 * FORM, columns % 32
    else:
        base, i = rows + columns // 256 * FORM, columns % 256
    if FORM == 18:
        return _half(base) * _book(_nibble(base + 2, i))
    if FORM == 22 or FORM == 24:
        return _q5(base, i, FORM == 24)
    if FORM == 84:
        return _q2_k(base, i)
    if FORM == 110:
        return _q3_k(base, i)
    if FORM == 136:
        return _iq4_xs(base, i)
    if FORM == 210:
        return _q6_k(base, i)
    return _q45_k(base, i, FORM == 176)
