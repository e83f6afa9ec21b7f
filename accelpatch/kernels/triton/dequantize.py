"""Dequantises int8 and 4-bit weights to floats, slice by slice, for torch's GEMM; see weight_only.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.row_major import FP8_BLOCK
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.triton.launch import cdiv

SLICE = 1 << 28  # bytes of a dequantised slice; slices small enough for the L2 cache were not faster
Floats = Callable[[int, int, Tensor], None]
Sizes = tuple[int, int, int]  # steps of K, sets of scales, log2 of the steps that share one
Form = tuple[int, int, int]  # kind of offset, group, groups in a step


@triton.jit
def _int8_rows(  # type: ignore[no-untyped-def]
    q, scale, out, n, k, groups, size,
    PER_ROW: tl.constexpr, E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    at = rows[:, None] * k + columns[None, :]
    codes = tl.load(q + at, mask=inside, other=0)
    values = _of_e4m3(codes.to(tl.int32)) if E4M3 else codes.to(tl.float32)
    if PER_ROW:
        scales = tl.load(scale + rows, mask=rows < n, other=0.0)[:, None]
    else:
        scales = tl.load(scale + rows[:, None] * groups + (columns // size)[None, :], mask=inside, other=0.0)
    tl.store(out + at, (values * scales.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pick(code, a, b, c, d):  # type: ignore[no-untyped-def]
    """One of four numbers by the lowest bits of a code."""
    odd = (code & 1) != 0
    return tl.where((code & 2) != 0, tl.where(odd, d, c), tl.where(odd, b, a))


@triton.jit
def _of_e2m1(code):  # type: ignore[no-untyped-def]
    """A 2^14th of the value of each int32 code of e2m1: sign, exponent and fraction as they lie in float16."""
    return ((code & 8) << 12 | (code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _of_book(code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value of each code of a codebook (codebooks.py), float32."""
    if KIND == 5 or KIND == 6:
        return _of_e2m1(code) * 16384.0
    upper = (code & 4) != 0
    if KIND == 4:
        first, last = (
            _pick(code, 0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
            _pick(code, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        )
        size = tl.where(upper, last, first)
        return tl.where((code & 8) != 0, -size, size)
    low = tl.where(
        upper,
        _pick(code, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        _pick(code, -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    )
    high = tl.where(
        upper,
        _pick(code, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        _pick(code, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    )
    return tl.where((code & 8) != 0, high, low)


@triton.jit
def _of_e4m3(byte):  # type: ignore[no-untyped-def]
    """Value of each int32 byte of e4m3, float32: the bits as they lie in float16 are a 256th."""
    return ((byte & 128) << 8 | (byte & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _row_factors(offset, clamped, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """nvfp4: the float32 factor of each row, [rows, 1]; 1 for other kinds. clamped: row numbers within the tiles."""
    if KIND == 6:
        return tl.load(offset + clamped).to(tl.float32)[:, None]
    else:  # noqa: RET505  one return alone is compiled
        return 1.0


@triton.jit
def _scales_and_offsets(  # type: ignore[no-untyped-def]
    scale, offset, at, upper_group, row_factors, step, shift, KIND: tl.constexpr, GROUPS: tl.constexpr
):
    """Scales and offsets of a K step, float32. at: where the first set of scales begins. For nvfp4 alone, upper_group:
    whether a word has the last 16 of 32 values; row_factors: the factors of the rows."""
    place = at + (step >> shift) * (16 * GROUPS)
    if KIND == 6:  # a pair of e4m3 scales: for the first and for the last 16 of 32 values
        pair = tl.load(scale + place).to(tl.int32)
        scales = _of_e4m3(tl.where(upper_group[None, :], pair >> 8, pair)) * row_factors
        offsets = scales
    elif KIND >= 3:  # the two halves of a float32 scale; for e2m1 the high half alone
        bits = tl.load(scale + place).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        if KIND != 5:
            bits = bits | tl.load(offset + place).to(tl.uint16, bitcast=True).to(tl.uint32)
        scales = bits.to(tl.float32, bitcast=True)
        offsets = scales
    else:
        scales = tl.load(scale + place).to(tl.float32)
        offsets = scales if KIND == 0 else tl.load(offset + place).to(tl.float32)
    return scales, offsets


@triton.jit
def _value(words, e: tl.constexpr, scales, offsets, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value e of each word, float32."""
    if KIND >= 3:
        return _of_book(((words >> (e // 2 * 4 + e % 2 * 16)) & 15) ^ 8, KIND) * scales
    # The bits of 2^23 + code. Tiles store a code with its top bit inverted.
    bits = ((words >> (e // 2 * 4 + e % 2 * 16)) & 15) ^ 0x4B000008
    value = bits.to(tl.float32, bitcast=True) - 8388608.0
    if KIND == 0:
        return (value - 8.0) * scales
    return (value - offsets) * scales if KIND == 1 else value * scales + offsets


@triton.jit
def _four(words, low: tl.constexpr, scales, offsets, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values low, low + 2, low + 4 and low + 6 of each word as [..., e // 4, e // 2 % 2]."""
    outer = tl.join(_value(words, low, scales, offsets, KIND), _value(words, 4 + low, scales, offsets, KIND))
    inner = tl.join(_value(words, 2 + low, scales, offsets, KIND), _value(words, 6 + low, scales, offsets, KIND))
    return tl.join(outer, inner)


@triton.jit(do_not_specialize=["steps", "sets", "shift"])
def _int4_weight_rows(  # type: ignore[no-untyped-def]
    tiles, scale, offset, out, n, k, steps, sets, shift,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    step, place = tl.program_id(1), tl.arange(0, 16)
    word = place % 4 * 4 + place // 4  # the words of neighbouring columns come one after the other
    clamped = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
    at = (((clamped // 16) * sets * 8 + clamped % 8) * (2 * GROUPS) + clamped % 16 // 8)[:, None]
    if GROUPS > 1:
        at = at + ((32 * (word % 4) + 8 * (word // 4)) // GROUP * 2)[None, :]
    row_factors = _row_factors(offset, clamped, KIND)
    scales, offsets = _scales_and_offsets(scale, offset, at, word >= 8, row_factors, step, shift, KIND, GROUPS)
    words = tl.load(tiles + ((clamped // 16 * steps + step) * 256 + clamped % 16 * 16)[:, None] + word[None, :])
    # A thread has the 8 values of a word contiguously, so that it stores 16 bytes at once.
    values = tl.join(
        _four(words, 0, scales, offsets, KIND).to(out.dtype.element_ty),
        _four(words, 1, scales, offsets, KIND).to(out.dtype.element_ty),
    )
    values = tl.reshape(values, [ROWS, 128])
    columns = step * 128 + tl.arange(0, 128)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    if INTERLEAVED:  # the first 8 rows of a tile are of the first half (gate), the last 8 of the second (up)
        rows = rows // 16 * 8 + rows % 8 + rows % 16 // 8 * (n // 2)
    tl.store(out + rows[:, None] * k + columns[None, :], values, mask=inside)


def int8_floats(q: Tensor, scale: Tensor) -> Floats:
    """A function (start, stop, out) that writes those rows of q[N, K] * scale[N, G] to out[stop - start, K]. q: int8,
    in groups of K / G values; or e4m3fn, with one scale a row or groups of 128 values."""
    (_, k), groups, e4m3 = q.shape, scale.shape[1], q.dtype == torch.float8_e4m3fn
    q, size = q.view(torch.int8), FP8_BLOCK if e4m3 and groups > 1 else k // groups

    def floats(start: int, stop: int, out: Tensor) -> None:
        rows, factors = (q, scale) if stop - start == len(q) else (q[start:stop], scale[start:stop])
        _int8_rows[(cdiv(stop - start, 8), cdiv(k, 1024))](
            rows, factors, out, stop - start, k, groups, size, groups == 1, e4m3, 8, 1024
        )

    return floats


def int4_floats(
    words: Tensor, scale: Tensor, offset: Tensor, k: int, sizes: Sizes, form: Form, interleaved: bool
) -> Floats:
    """As int8_floats for tiles: int32 words[tiles, steps, 256] and their tables; start must be a multiple of 16.

    sizes, form: the kernel's arguments. interleaved: the tiles interleave the rows of two halves; a slice's rows of the
    first half are then written before those of the second.
    """

    def floats(start: int, stop: int, out: Tensor) -> None:
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        tables = (words, scale, offset)
        if last - first < len(words):  # on the host a view costs as much as a launch
            tables = (words[first:last], scale[first:last], offset[first:last])
        _int4_weight_rows[(cdiv(stop - start, 64), sizes[0])](
            *tables, out, stop - start, k, *sizes, *form, 64, interleaved
        )

    return floats


def by_slices(flat: Tensor, y: Tensor, bias: Tensor | None, floats: Floats, interleaved: bool = False) -> None:
    """y[M, N] = flat[M, K] @ w^T + bias by torch's GEMM. floats: writes rows of w. interleaved: as of
    `int4_floats`."""
    k, n = flat.shape[1], y.shape[1]
    step = min(n, max(1, SLICE // (flat.element_size() * k * TILE_ROWS)) * TILE_ROWS)
    weight = flat.new_empty((step, k))
    bias_in_x_dtype = None if bias is None else bias.to(flat.dtype)
    for start in range(0, n, step):
        stop = min(start + step, n)
        floats(start, stop, weight)
        parts = [(start, weight if stop - start == step else weight[: stop - start])]
        if interleaved and step < n:
            half = (stop - start) // 2
            parts = [(start // 2, weight[:half]), ((n + start) // 2, weight[half : 2 * half])]
        for column, w in parts:
            out = y if w.shape[0] == n else y[:, column : column + w.shape[0]]
            if bias_in_x_dtype is None:
                torch.mm(flat, w.t(), out=out)
            else:
                torch.addmm(bias_in_x_dtype[column : column + w.shape[0]], flat, w.t(), out=out)
