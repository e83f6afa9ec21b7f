"""GEMMs of some rows of x with int8, e4m3 and int4 weights on Hopper's matrix unit: the kernels of hopper_gemm.py.

The weight's rows are the M dimension of wgmma, whose left operand lies in registers: a program loads codes as int16
and converts them to floats of code - 8 (or of int8's value), two in an instruction, without reordering them. Their
order along K is that of the bits in a word; `spread` brings x into the same order beforehand, and TMA loads it. A scale
multiplies the sum of its 128 products in float32, not each weight, and what is added to each weight of a group (its
offset) multiplies the sum of the group's x. K is split where there are too few blocks for the GPU, and a second kernel
adds the splits in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.dequantize import _of_e4m3
from accelpatch.kernels.triton.hopper_gemm_values import finish, places

#: 0x4300 | code, of a 4-bit code with its top bit inverted, is 128 + code in bfloat16; 0x6400, 1024 + code in float16
_FOUR = tl.constexpr("""{
    .reg .b32 a, b, c, d, e, f, g, h;
    mov.b32 h, 0x43084308;
    shr.u32 a, $4, 4;
    shr.u32 b, $4, 8;
    shr.u32 c, $4, 12;
    lop3.b32 d, $4, 0x000f000f, h, 0x6a;
    lop3.b32 e, a, 0x000f000f, h, 0x6a;
    lop3.b32 f, b, 0x000f000f, h, 0x6a;
    lop3.b32 g, c, 0x000f000f, h, 0x6a;
    sub.bf16x2 $0, d, h;
    sub.bf16x2 $1, e, h;
    sub.bf16x2 $2, f, h;
    sub.bf16x2 $3, g, h;
}""")
_FOUR_HALF = tl.constexpr(_FOUR.value.replace("bf16", "f16").replace("0x4308", "0x6408").replace("4308;", "6408;"))
#: 128 + the lowest 7 bits, less 128 or, where the sign is set, 256
_EIGHT = tl.constexpr("""{
    .reg .b32 a, b, c, d, e, h;
    mov.b32 h, 0x43004300;
    shr.u32 a, $2, 8;
    lop3.b32 b, $2, 0x007f007f, h, 0xea;
    lop3.b32 c, $2, 0x00800080, h, 0xea;
    lop3.b32 d, a, 0x007f007f, h, 0xea;
    lop3.b32 e, a, 0x00800080, h, 0xea;
    sub.bf16x2 $0, b, c;
    sub.bf16x2 $1, d, e;
}""")
_EIGHT_HALF = tl.constexpr("""{
    .reg .b32 a, b, c, h;
    mov.b32 h, 0x64806480;
    shr.u32 a, $2, 8;
    lop3.b32 b, $2, 0x00ff00ff, h, 0x6a;
    lop3.b32 c, a, 0x00ff00ff, h, 0x6a;
    sub.f16x2 $0, b, h;
    sub.f16x2 $1, c, h;
}""")
#: e4m3 is converted by way of float16, which has all its values; the even bytes come first
_E4M3_HALF = tl.constexpr("""{
    .reg .b32 a;
    .reg .b16 l, h;
    prmt.b32 a, $2, 0, 0x3120;
    mov.b32 {l, h}, a;
    cvt.rn.f16x2.e4m3x2 $0, l;
    cvt.rn.f16x2.e4m3x2 $1, h;
}""")
_E4M3 = tl.constexpr("""{
    .reg .b32 a, b, c;
    .reg .b16 l, h, d, e;
    .reg .f32 f, g;
    prmt.b32 a, $2, 0, 0x3120;
    mov.b32 {l, h}, a;
    cvt.rn.f16x2.e4m3x2 b, l;
    cvt.rn.f16x2.e4m3x2 c, h;
    mov.b32 {d, e}, b;
    cvt.f32.f16 f, d;
    cvt.f32.f16 g, e;
    cvt.rn.bf16x2.f32 $0, g, f;
    mov.b32 {d, e}, c;
    cvt.f32.f16 f, d;
    cvt.f32.f16 g, e;
    cvt.rn.bf16x2.f32 $1, g, f;
}""")


E4M3 = tl.constexpr(3)  # of KIND: a byte is an 8-bit float
AHEAD = tl.constexpr(8)  # steps that a scale is in L2 before it is multiplied


@triton.jit
def _column(place, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column of x, of the 128 of a step, that is multiplied by the weight at each place of the step."""
    if BITS == 8:
        column = place % 64 * 2 + place // 64
    else:
        word = place % 32 // 2
        column = 32 * (word % 4) + 8 * (word // 4) + place // 32 * 2 + place % 2
    return column


@triton.jit(do_not_specialize=["steps"])
def spread(  # type: ignore[no-untyped-def]
    x,
    out,
    sums,
    k,
    x_stride,
    steps,
    BITS: tl.constexpr,
    SUMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Reorder x[m, k] to out[m, steps, 128], with zeros beyond the end of a row; and sums[steps, m] of a step's x."""
    overlap(DEPENDENT)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, 128)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    columns = step[:, None] * 128 + _column(place, BITS)[None, :]
    values = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0)
    inside = (step < steps)[:, None] & (place >= 0)[None, :]
    tl.store(out + (row * steps + step[:, None]) * 128 + place[None, :], values, mask=inside)
    if SUMS:
        tl.store(sums + step * tl.num_programs(0) + row, tl.sum(values.to(tl.float32), 1), mask=step < steps)


@triton.jit
def _eight(w, FLOAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of int8 as int16 [R, 64] -> FLOAT [R, 128]."""
    if ASM and tl.float16 == FLOAT:
        even, odd = tl.inline_asm_elementwise(_EIGHT_HALF, "=r,=r,r", [w], (tl.float16, tl.float16), True, 2)
    elif ASM:
        even, odd = tl.inline_asm_elementwise(_EIGHT, "=r,=r,r", [w], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        even, odd = w.to(tl.int8, bitcast=False).to(FLOAT), (w >> 8).to(FLOAT)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [w.shape[0], 128])


@triton.jit
def _e4m3(w, FLOAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of e4m3 as int16 [R, 64] -> FLOAT [R, 128]."""
    if ASM and tl.float16 == FLOAT:
        even, odd = tl.inline_asm_elementwise(_E4M3_HALF, "=r,=r,r", [w], (tl.float16, tl.float16), True, 2)
    elif ASM:
        even, odd = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [w], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        even, odd = _of_e4m3(w.to(tl.int32)).to(FLOAT), _of_e4m3((w >> 8).to(tl.int32)).to(FLOAT)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [w.shape[0], 128])


@triton.jit
def _four(w, FLOAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of tiles as int16 [R, 32] -> FLOAT [R, 128] of code - 8."""
    if ASM and tl.float16 == FLOAT:
        a, b, c, d = tl.inline_asm_elementwise(
            _FOUR_HALF, "=r,=r,=r,=r,r", [w], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    elif ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r", [w], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        a, b = (((w & 15) ^ 8) - 8).to(FLOAT), ((((w >> 4) & 15) ^ 8) - 8).to(FLOAT)
        c, d = ((((w >> 8) & 15) ^ 8) - 8).to(FLOAT), ((((w >> 12) & 15) ^ 8) - 8).to(FLOAT)
    return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1)), [w.shape[0], 128])


@triton.jit
def _weights(w, FLOAT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """int16 [R, 8 * BITS] of a step's codes -> FLOAT [R, 128]: values of 8 bits, or 4-bit codes less 8."""
    if KIND == E4M3:
        found = _e4m3(w, FLOAT, ASM)
    elif BITS == 8:
        found = _eight(w, FLOAT, ASM)
    else:
        found = _four(w, FLOAT, ASM)
    return found


@triton.jit
def _load(pointers, ASM: tl.constexpr, WANTED: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Load 32 bits where WANTED, else give 0. ASM: the load stays here, where the compiler would move it down."""
    if not WANTED:
        found = 0
    elif ASM:
        found = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
        )
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def _prefetch_lines(pointers):  # type: ignore[no-untyped-def]
    """Prefetch lines of memory into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _prefetch(scales, offsets, place, S_STEP: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch scales, and offsets where KIND has them, into L2."""
    if ASM:
        _prefetch_lines(scales + place * S_STEP)
        if KIND == 1 or KIND == 2:
            _prefetch_lines(offsets + place * (2 * S_STEP))


@triton.jit
def _scales(scale, at, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of the rows' first scales, and how far to shift what lies there. BITS 4: a word has the scales of rows
    r and r + 8."""
    return scale.to(tl.pointer_type(tl.int32)) + at // 2 if BITS == 4 else scale + at, (at % 2 * 16).to(tl.int32)


@triton.jit
def _factor(pairs, upper, FLOAT: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales, float32. BITS 4: pairs of two 16-bit scales in a word, of which `upper` says how far to shift."""
    if BITS == 4:
        pairs = (pairs >> upper).to(tl.int16).to(FLOAT, bitcast=True)
    return pairs.to(tl.float32)


@triton.jit
def _added(scale, offset, place, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part of each weight of a group that (code - 8) * scale leaves out, float32."""
    scales, offsets = tl.load(scale + place).to(tl.float32), tl.load(offset + place).to(tl.float32)
    return (8.0 - offsets) * scales if KIND == 1 else 8.0 * scales + offsets


@triton.jit
def _multiplied(  # type: ignore[no-untyped-def]
    total, x, x_rows, w_rows, first, step, scales,
    BITS: tl.constexpr, KIND: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """total + the dot products of a step times the rows' scales. w_rows: addresses of the step's codes."""
    x_tile = tl.trans(x.load([first, step * 128])) if TMA else tl.load(x_rows + step * 128)
    sums = tl.dot(_weights(tl.load(w_rows), x_tile.dtype, BITS, KIND, ASM), x_tile)
    return total + sums * scales[:, None]


@triton.jit
def _with_sums(total, sums, scale, offset, at, begin, end, m, token, shift, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + what is added to each weight of a group, times the sum of the group's x."""
    if KIND == 1 or KIND == 2:
        for start in tl.range(begin, end, 16, num_stages=1):
            step = start + tl.arange(0, 16)
            place = at[:, None] + (tl.minimum(step, end - 1) >> shift)[None, :] * 16
            group_sums = tl.load(sums + step[:, None] * m + token[None, :], mask=(step < end)[:, None], other=0.0)
            total = tl.dot(_added(scale, offset, place, KIND), group_sums, total, input_precision="tf32x3")
    return total


@triton.jit(do_not_specialize=["m", "run", "steps", "sets", "shift"])
def product(  # type: ignore[no-untyped-def]
    x, plain, sums, w, scale, offset, bias, y, parts, m, n, columns, w_row, run, steps, sets, shift,
    BITS: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr,
    CUT: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    first = tl.program_id(0) % across * TOKENS  # programs that share weight rows run together
    token = tl.minimum(first + tl.arange(0, TOKENS), m - 1)
    start = (tl.program_id(0) // across).to(tl.int64) * ROWS
    codes, at = places(w, start + tl.arange(0, ROWS), n, w_row, steps, sets, BITS)
    w_rows = codes[:, None] + tl.arange(0, 8 * BITS)[None, :]
    scales, upper = _scales(scale, at, BITS)
    W_STEP: tl.constexpr = 512 if BITS == 4 else 64
    S_STEP: tl.constexpr = 8 if BITS == 4 else 1
    x_rows = x if TMA else x + token.to(tl.int64)[None, :] * (steps * 128) + tl.arange(0, 128)[:, None]
    begin, end = split * run, tl.minimum((split + 1) * run, steps)
    overlap(DEPENDENT)
    total, current = tl.zeros([ROWS, TOKENS], tl.float32), tl.load(scales + (begin >> shift) * S_STEP)
    second = tl.load(scales + (tl.minimum(begin + 1, end - 1) >> shift) * S_STEP)
    for step in tl.range(begin, end, PAIR):
        if SCALES:  # the next steps' scales are loaded while these steps multiply
            soon = _load(scales + (tl.minimum(step + PAIR, end - 1) >> shift) * S_STEP, ASM and BITS == 4)
            later = _load(scales + (tl.minimum(step + 3, end - 1) >> shift) * S_STEP, ASM and BITS == 4, PAIR == 2)
            _prefetch(scales, offset + at, tl.minimum(step + AHEAD, end - 1) >> shift, S_STEP, KIND, ASM)
        factors = _factor(current, upper, scale.dtype.element_ty, BITS)
        total = _multiplied(total, x, x_rows, w_rows + step * W_STEP, first, step, factors, BITS, KIND, TMA, ASM)
        if PAIR == 2:
            last = tl.minimum(step + 1, end - 1)
            factors = tl.where(step + 1 < end, _factor(second, upper, scale.dtype.element_ty, BITS), 0.0)
            total = _multiplied(total, x, x_rows, w_rows + last * W_STEP, first, last, factors, BITS, KIND, TMA, ASM)
        if SCALES:
            current = soon
            if PAIR == 2:
                second = later
    total = _with_sums(total, sums, scale, offset, at, begin, end, m, token, shift, KIND)
    finish(total, plain, w, scale, offset, bias, y, parts, m, n, columns, w_row, begin, end, steps, sets, shift, first,
           start, split, ROWS, TOKENS, BITS, KIND, PART, BIAS, CUT)  # fmt: skip
