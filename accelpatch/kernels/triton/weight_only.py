"""GEMMs of many rows with int8 and 4-bit weights: see int8_linear.py and tiled_int4_linear.py in ../ops/.

Up to some number of rows a kernel dequantises blocks of the weight in registers (gemm.py has int8's kernel, and split
K). Beyond that the weight is dequantised to memory (dequantize.py) for torch's own GEMM. Weights are rounded to x's
dtype as in the references, except that int8's scale is applied in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.layouts.int4_tiles import Tiles, places
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES
from accelpatch.kernels.triton.dequantize import (
    Floats,
    _of_e2m1,
    _row_factors,
    _scales_and_offsets,
    _value,
    by_slices,
    int4_floats,
    int8_floats,
)
from accelpatch.kernels.triton.gemm import INT8, Block, Blocks, flat_rows, grid, in_runs, leave, linear
from accelpatch.kernels.triton.launch import on

Rows = Callable[[int, int, torch.dtype], Tensor]
KINDS = {"none": 0, "zero_point": 1, "minimum": 2, "nf4": 3, "fp4": 4, "e2m1": 5, "nvfp4": 6}
INT4 = Blocks((Block(16, 64, 128, 4, 6), Block(32, 64, 128, 4, 4), Block(64, 128, 128, 8, 4)))


@triton.jit(do_not_specialize=["steps"])
def _spread(x, out, k, x_stride, steps):  # type: ignore[no-untyped-def]
    """Reorder x[m, k] to out[m, steps, 8, 16]: value e of word i of a K step; 0 beyond the end of a row."""
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, word = tl.arange(0, 8), tl.arange(0, 16)
    columns = (step * 128 + 32 * (word % 4) + 8 * (word // 4))[None, :] + e[:, None]
    values = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0)
    tl.store(out + (row * steps + step) * 128 + e[:, None] * 16 + word[None, :], values)


def _pairs(bf16: bool) -> str:
    """Instructions for the eight values of each of two words $8 and $9, codes of e2m1, times scales $10, as pairs of
    16-bit floats. Exponent and fraction of a code, below its sign, are 2^-126 of it in bfloat16 and 2^-14 in float16,
    subnormal numbers too; tiles store the sign inverted."""
    to, places, form = (6, "0x01c001c0", "bf16x2") if bf16 else (9, "0x0e000e00", "f16x2")
    lines = [".reg .b32 a, b, c, d, h;", "mov.b32 h, 0x80008000;"]
    for half, bytes_of_both in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 d, $8, $9, {bytes_of_both};")
        for nibble in range(4):
            by = to - 4 * nibble
            lines += [
                f"shl.b32 a, d, {12 - 4 * nibble};",
                f"shl.b32 b, d, {by};" if by > 0 else f"shr.u32 b, d, {-by};",
                f"and.b32 b, b, {places};",
                "lop3.b32 c, a, h, b, 0xae;",
                f"fma.rn.{form} ${2 * nibble + half}, c, $10, h;",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


_PAIRS, _HALF_PAIRS = tl.constexpr(_pairs(True)), tl.constexpr(_pairs(False))
_OUTPUTS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def _up(FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of nvfp4's scales with which a code (`_pairs`) times its scale is 2^-8 of the weight."""
    return 2.0**6 if tl.float16 == FLOAT else 2.0**118


@triton.jit
def _scaled(words, e: tl.constexpr, scale):  # type: ignore[no-untyped-def]
    """2^-8 of value e of each word times its scale, exactly, in scale's dtype."""
    code = _of_e2m1(((words >> (e // 2 * 4 + e % 2 * 16)) & 15) ^ 8)
    down = 1.0 if scale.dtype == tl.float16 else 2.0**-112
    return (code * (scale.to(tl.float32) * down)).to(scale.dtype)


@triton.jit
def _nvfp4(words, scale, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^-8 times the values of a step's words[R, 16] times their scales, [R, 128] in the order of `_spread`."""
    if ASM and scale.dtype == tl.float16:
        a, b, c, d, e, g, h, i = tl.inline_asm_elementwise(
            _HALF_PAIRS, _OUTPUTS, [words, scale],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    elif ASM:
        a, b, c, d, e, g, h, i = tl.inline_asm_elementwise(
            _PAIRS, _OUTPUTS, [words, scale],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True, 2,
        )  # fmt: skip
    else:
        a, b, c, d = (
            _scaled(words, 0, scale),
            _scaled(words, 1, scale),
            _scaled(words, 2, scale),
            _scaled(words, 3, scale),
        )
        e, g, h, i = (
            _scaled(words, 4, scale),
            _scaled(words, 5, scale),
            _scaled(words, 6, scale),
            _scaled(words, 7, scale),
        )
    all = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, g), tl.join(h, i)))
    return tl.reshape(tl.permute(all, (0, 4, 3, 2, 1)), [words.shape[0], 128])


# Specialisation on multiples of 16 would change no instruction of these, and compile one kernel more for each case.
@triton.jit(do_not_specialize=["m", "run", "steps", "sets", "shift"])
def _int4_gemm(  # type: ignore[no-untyped-def]
    x, tiles, scale, offset, bias, y, parts, m, n, run, steps, sets, shift,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr, ASM: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # programs that share weight rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    clamped = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
    tile, word = clamped // 16, tl.arange(0, 16)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * (steps * 128)
    x_rows = x_rows + tl.arange(0, 128 if KIND == 6 else 16)[:, None]
    w_rows = tiles + (tile * steps * 256 + clamped % 16 * 16)[:, None] + word[None, :]
    at = ((tile * sets * 8 + clamped % 8) * (2 * GROUPS) + clamped % 16 // 8)[:, None]
    if GROUPS > 1:
        at = at + ((32 * (word % 4) + 8 * (word // 4)) // GROUP * 2)[None, :]
    begin, end = split * run, tl.minimum((split + 1) * run, steps)
    # The row factors of nvfp4 multiply the sums, after the loop.
    row_factors = _up(x.dtype.element_ty) if KIND == 6 else 1.0
    scales, offsets = _scales_and_offsets(scale, offset, at, word >= 8, row_factors, begin, shift, KIND, GROUPS)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(begin, end):
        # The next step's scales are loaded while this step multiplies.
        next_tables = _scales_and_offsets(
            scale, offset, at, word >= 8, row_factors, tl.minimum(step + 1, end - 1), shift, KIND, GROUPS
        )
        words = tl.load(w_rows + step * 256)
        if KIND == 6:
            x_tile = tl.load(x_rows + step * 128)
            total = tl.dot(_nvfp4(words, scales.to(x_tile.dtype), ASM), x_tile, total)
        else:
            for e in tl.static_range(8):
                value = _value(words, e, scales, offsets, KIND)
                total = tl.dot(value.to(x.dtype.element_ty), tl.load(x_rows + step * 128 + e * 16), total)
        scales, offsets = next_tables
    if KIND == 6:
        total = total * (_row_factors(offset, clamped, KIND) * 256.0)
    leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the operation."""
    q, scale, m = q.contiguous(), scale.contiguous(), x.numel() // x.shape[-1]
    if scale.shape[1] == 1 and 0 < m <= INT8.most and x.dtype in HALVES:
        return linear(x, q, scale, bias)
    return as_written(x, q.shape[0], bias, int8_floats(q, scale))


def tiled_int4_linear(x: Tensor, *args: object) -> Tensor:
    """As the operation, for tiles that are not interleaved; or for "both" with so many rows that they are `written`."""
    *rest, bias = args
    assert bias is None or isinstance(bias, Tensor)
    w, scale, offset, n, k, group, kind, part = Tiles(*rest)  # type: ignore[arg-type]
    flat, words, scale = flat_rows(x), w.contiguous().view(torch.int32), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    offset_or_scale = scale if offset is None else offset.contiguous()
    steps, groups, shift = places(k, group).values()
    sizes, form = (steps, scale.shape[1], shift), (KINDS[kind], TILE_VALUES // groups if groups > 1 else group, groups)

    native = x.is_cuda and probe(x.device).vendor == "nvidia"

    def product(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        spread = flat.new_empty((flat.shape[0], steps * TILE_VALUES))
        _spread[(flat.shape[0], steps)](flat, spread, k, flat.stride(0), steps, num_warps=1)
        _int4_gemm[grid(flat, n, block, splits)](
            spread, words, scale, offset_or_scale, y if bias is None else bias, y, parts, flat.shape[0], n,
            run // TILE_VALUES, *sizes, *form, bias is not None, splits > 1, native, block.tokens,
            block.rows, **block.options(),
        )  # fmt: skip

    m = flat.shape[0]
    if part == "both" or not 0 < m <= INT4.most or x.dtype not in HALVES:
        return written_out(Tiles(*rest), bias)(x)  # type: ignore[arg-type]
    y = x.new_empty((m, n))
    with on(x):
        in_runs(flat, y, bias, INT4, product)
    return y.view(*x.shape[:-1], n)


def written_out(tiles: Tiles, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function for the GEMM with any number of rows of x, dequantising to memory; made once for many calls."""
    interleaved = tiles.part == "both"
    floats = _floats_of(tiles, interleaved)
    return lambda x: as_written(x, tiles.n, bias, floats, interleaved)


def _floats_of(tiles: Tiles, interleaved: bool) -> Floats:
    scale, shape = tiles.scale.contiguous(), places(tiles.k, tiles.group)
    steps, groups, shift = shape.values()
    offset_or_scale = scale if tiles.offset is None else tiles.offset.contiguous()
    group = TILE_VALUES // groups if groups > 1 else tiles.group  # values whose scales share 16 bits of the table
    sizes, form = (steps, scale.shape[1], shift), (KINDS[tiles.kind], group, groups)
    return int4_floats(
        tiles.w.contiguous().view(torch.int32), scale, offset_or_scale, tiles.k, sizes, form, interleaved
    )


def rows_of(tiles: Tiles) -> Rows:
    """(start, stop, dtype) -> rows start .. stop - 1 of the weight of `tiles`, [stop - start, K]."""
    floats = _floats_of(tiles, tiles.part != "all")
    half, shared = tiles.rows // 2, TILE_ROWS if tiles.part == "all" else TILE_ROWS // 2

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if tiles.part == "both" and start < half < stop and (start, stop) != (0, tiles.rows):
            return torch.cat([rows(start, half, dtype), rows(half, stop, dtype)])
        # Whether the rows are those of the second half, up.
        later = tiles.part == "up" or (tiles.part == "both" and start >= half)
        behind = half if tiles.part == "both" and later else 0
        first, last = (start - behind) // shared * shared, -(-(stop - behind) // shared) * shared
        if tiles.part == "all":
            last = stop
        elif stop - start == tiles.rows:
            first, last = 0, half
        both = 1 if tiles.part == "all" else 2
        out = tiles.w.new_empty((both * (last - first), tiles.k), dtype=dtype)
        with on(out):
            floats(both * first, both * last, out)
        begin = start - behind - first + (last - first if later else 0)
        return out[begin : begin + stop - start]

    return rows


def int8_rows_of(q: Tensor, scale: Tensor) -> Rows:
    """As `rows_of`, of q[N, K] * scale[N, G]."""
    floats = int8_floats(q.contiguous(), scale.contiguous())

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        out = q.new_empty((stop - start, q.shape[1]), dtype=dtype)
        with on(out):
            floats(start, stop, out)
        return out

    return rows


def written(m: int) -> bool:
    """Whether 4-bit weights are dequantised to memory for m rows of x."""
    return m > INT4.most


def as_written(x: Tensor, n: int, bias: Tensor | None, floats: Floats, interleaved: bool = False) -> Tensor:
    """y[..., n] by torch's GEMM with the weight that floats(start, stop, out) writes."""
    flat = flat_rows(x)
    y = x.new_empty((flat.shape[0], n))
    if flat.shape[0]:
        with on(x):
            by_slices(flat, y, bias, floats, interleaved)
    return y.view(*x.shape[:-1], n)
