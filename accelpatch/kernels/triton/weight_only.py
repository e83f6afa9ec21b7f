"""Products of many rows with int8 and 4-bit weights: see ../int8_linear.py, ../tiled_int4_linear.py, ../hip/layout.py.

Up to FUSED rows one kernel turns a block of the weight into x's dtype in registers and multiplies it, the weight's rows
as the rows of the matrix instruction; where the blocks are fewer than the device has room for, K is cut and a second
kernel adds the runs up, in a fixed order. For more rows a slice of the weight is written out as floats and torch's own
product takes it. Weights are rounded to x's dtype as in the references, but for an int8 scale in the fused form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.hip.layout import TILE_ROWS, TILE_VALUES
from accelpatch.kernels.int4_tiles import Tiles, places
from accelpatch.kernels.triton.launch import on

FUSED = 512  # rows of x up to which the weight is turned into floats in registers
HALVES = (torch.bfloat16, torch.float16)
PROGRAMS = 264  # blocks that a device should have to do: two for each multiprocessor of the one measured
LEAST_RUN = 512  # of K, where it is cut
SLICE = 1 << 28  # bytes of weight as floats at a time
KINDS = {"none": 0, "zero_point": 1, "minimum": 2}


@dataclass(frozen=True)
class Block:
    """What a program makes: `tokens` rows of x by `rows` of the weight, `columns` of K at a time (int8)."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


#: the first whose tokens suffice, else the last
BLOCKS = (Block(16, 64, 128, 4, 4), Block(32, 64, 128, 4, 4), Block(64, 64, 128, 4, 4), Block(128, 128, 64, 8, 3))


@triton.jit
def _int8_rows(  # type: ignore[no-untyped-def]
    q, scale, out, n, k, groups, size, PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    place = rows[:, None] * k + columns[None, :]
    values = tl.load(q + place, mask=inside, other=0).to(tl.float32)
    if PER_ROW:
        factor = tl.load(scale + rows, mask=rows < n, other=0.0)[:, None]
    else:
        factor = tl.load(scale + rows[:, None] * groups + (columns // size)[None, :], mask=inside, other=0.0)
    tl.store(out + place, (values * factor.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _beside(scale, offset, at, step, shift, KIND: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales and offsets of a step, float32; `at`: where those of the first set lie."""
    place = at + (step >> shift) * (16 * GROUPS)
    factor = tl.load(scale + place).to(tl.float32)
    return factor, factor if KIND == 0 else tl.load(offset + place).to(tl.float32)


@triton.jit
def _weight(value, factor, beside, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 0:
        return (value - 8.0) * factor
    return (value - beside) * factor if KIND == 1 else value * factor + beside


@triton.jit
def _int4_rows(  # type: ignore[no-untyped-def]
    tiles, scale, offset, out, n, k, steps, sets, shift,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    held = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
    word, e = tl.arange(0, 16), tl.arange(0, 8)
    at = (((held // 16) * sets * 8 + held % 8) * (2 * GROUPS) + held % 16 // 8)[:, None]
    within = 32 * (word % 4) + 8 * (word // 4)
    at = at + (within // GROUP * 2)[None, :] if GROUPS > 1 else at + word[None, :] * 0
    factor, beside = _beside(scale, offset, at, step, shift, KIND, GROUPS)
    words = tl.load(tiles + (held // 16 * steps + step)[:, None] * 256 + (held % 16 * 16)[:, None] + word[None, :])
    shifts = (e // 2) * 4 + (e % 2) * 16
    bits = ((words[:, :, None] >> shifts[None, None, :]) & 15) | 0x4B000000  # 2^23 + value
    value = _weight(bits.to(tl.float32, bitcast=True) - 8388608.0, factor[:, :, None], beside[:, :, None], KIND)
    columns = (step * 128 + within)[:, None] + e[None, :]
    inside = (rows < n)[:, None, None] & (columns < k)[None, :, :]
    place = rows[:, None, None] * k + columns[None, :, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    total, bias, y, parts, tokens, rows, m, n, split, BIAS: tl.constexpr, CUT: tl.constexpr
):
    inside = (rows < n)[:, None] & (tokens < m)[None, :]
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    if not CUT:
        if BIAS:
            total += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + split.to(tl.int64) * m * n + place, total, mask=inside)


@triton.jit(do_not_specialize=["m"])
def _int8_product(  # type: ignore[no-untyped-def]
    x, q, scale, bias, y, parts, m, n, k, x_stride, run,
    BIAS: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # those that share rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * x_stride
    q_rows = q + tl.minimum(rows, n - 1)[:, None] * k
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(split * run, tl.minimum((split + 1) * run, k), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if EVEN:
            w = tl.load(q_rows + columns[None, :])
            given = tl.load(x_rows + columns[:, None])
        else:
            w = tl.load(q_rows + columns[None, :], mask=(columns < k)[None, :], other=0)
            given = tl.load(x_rows + columns[:, None], mask=(columns < k)[:, None], other=0.0)
        total = tl.dot(w.to(x.dtype.element_ty), given, total)
    total = total * tl.load(scale + tl.minimum(rows, n - 1)).to(tl.float32)[:, None]
    _leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


@triton.jit
def _spread(x, out, k, x_stride, steps):  # type: ignore[no-untyped-def]
    """x[m, k] as out[m, steps, 8, 16]: value e of word i of a step, 0 behind the row's end."""
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, word = tl.arange(0, 8), tl.arange(0, 16)
    columns = (step * 128 + 32 * (word % 4) + 8 * (word // 4))[None, :] + e[:, None]
    values = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0)
    tl.store(out + (row * steps + step) * 128 + e[:, None] * 16 + word[None, :], values)


@triton.jit(do_not_specialize=["m"])
def _int4_product(  # type: ignore[no-untyped-def]
    x, tiles, scale, offset, bias, y, parts, m, n, run, steps, sets, shift,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BIAS: tl.constexpr, CUT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    split, across = tl.program_id(1), tl.cdiv(m, TOKENS)
    tokens = tl.program_id(0) % across * TOKENS + tl.arange(0, TOKENS)  # those that share rows run together
    rows = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, (n + 15) // 16 * 16 - 1)
    tile, word = held // 16, tl.arange(0, 16)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * (steps * 128) + word[:, None]
    w_rows = tiles + (tile * steps * 256 + held % 16 * 16)[:, None] + word[None, :]
    at = ((tile * sets * 8 + held % 8) * (2 * GROUPS) + held % 16 // 8)[:, None]
    if GROUPS > 1:
        at = at + ((32 * (word % 4) + 8 * (word // 4)) // GROUP * 2)[None, :]
    begin, end = split * run, tl.minimum((split + 1) * run, steps)
    factor, beside = _beside(scale, offset, at, begin, shift, KIND, GROUPS)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(begin, end):
        # those of the next step are on their way while this one multiplies
        ahead = _beside(scale, offset, at, tl.minimum(step + 1, end - 1), shift, KIND, GROUPS)
        words = tl.load(w_rows + step * 256)
        for e in tl.static_range(8):
            bits = ((words >> (e // 2 * 4 + e % 2 * 16)) & 15) | 0x4B000000  # 2^23 + value
            value = _weight(bits.to(tl.float32, bitcast=True) - 8388608.0, factor, beside, KIND)
            total = tl.dot(value.to(x.dtype.element_ty), tl.load(x_rows + step * 128 + e * 16), total)
        factor, beside = ahead
    _leave(total, bias, y, parts, tokens, rows, m, n, split, BIAS, CUT)


@triton.jit(do_not_specialize=["splits"])
def _add_up(  # type: ignore[no-untyped-def]
    parts, bias, y, count, n, splits, BIAS: tl.constexpr, SIZE: tl.constexpr
):
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


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the operation."""
    flat, q, scale = _rows(x), q.contiguous(), scale.contiguous()
    n, k, groups = *q.shape, scale.shape[1]

    def fused(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        _int8_product[_grid(flat, n, block, splits)](
            flat, q, scale, y if bias is None else bias, y, parts, flat.shape[0], n, k, flat.stride(0), run,
            bias is not None, splits > 1, k % block.columns == 0,
            block.tokens, block.rows, block.columns, **_options(block),
        )  # fmt: skip

    def floats(start: int, stop: int, out: Tensor) -> None:
        _int8_rows[(triton.cdiv(stop - start, 8), triton.cdiv(k, 1024))](
            q[start:stop], scale[start:stop], out, stop - start, k, groups, k // groups, groups == 1, 8, 1024
        )

    return _product(x, flat, n, bias, fused if groups == 1 else None, floats)


def tiled_int4_linear(x: Tensor, *args: object) -> Tensor:
    """As the operation."""
    *rest, bias = args
    assert bias is None or isinstance(bias, Tensor)
    w, scale, offset, n, k, group, kind = Tiles(*rest)  # type: ignore[arg-type]
    flat, words, scale = _rows(x), w.contiguous().view(torch.int32), scale.contiguous()
    beside = scale if offset is None else offset.contiguous()
    steps, groups, shift = places(k, group).values()
    sizes, form = (steps, scale.shape[1], shift), (KINDS[kind], group, groups)

    def fused(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        spread = flat.new_empty((flat.shape[0], steps * TILE_VALUES))
        _spread[(flat.shape[0], steps)](flat, spread, k, flat.stride(0), steps, num_warps=1)
        _int4_product[_grid(flat, n, block, splits)](
            spread, words, scale, beside, y if bias is None else bias, y, parts, flat.shape[0], n,
            run // TILE_VALUES, *sizes, *form, bias is not None, splits > 1, block.tokens, block.rows, **_options(block),
        )  # fmt: skip

    def floats(start: int, stop: int, out: Tensor) -> None:
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        _int4_rows[(triton.cdiv(stop - start, 64), steps)](
            words[first:last], scale[first:last], beside[first:last], out, stop - start, k, *sizes, *form, 64
        )

    return _product(x, flat, n, bias, fused, floats)


Fused = Callable[[Block, int, int, Tensor, Tensor], None]
Floats = Callable[[int, int, Tensor], None]


def _product(x: Tensor, flat: Tensor, n: int, bias: Tensor | None, fused: Fused | None, floats: Floats) -> Tensor:
    """y[..., n] by one of the two ways; fused(block, run, splits, y, parts), floats(start, stop, out)."""
    m, k = flat.shape
    y = x.new_empty((m, n))
    if m:
        with on(x):
            if fused is not None and m <= FUSED and x.dtype in HALVES:
                _fused(flat, y, bias, fused)
            else:
                _by_slices(flat, y, bias, floats)
    return y.view(*x.shape[:-1], n)


def _fused(flat: Tensor, y: Tensor, bias: Tensor | None, fused: Fused) -> None:
    (m, k), n = flat.shape, y.shape[1]
    block = next((one for one in BLOCKS if one.tokens >= m), BLOCKS[-1])
    programs = triton.cdiv(m, block.tokens) * triton.cdiv(n, block.rows)
    runs = max(1, min(PROGRAMS // programs, k // LEAST_RUN, 8))
    run = triton.cdiv(k, runs * TILE_VALUES) * TILE_VALUES
    splits = triton.cdiv(k, run)
    parts = y if splits == 1 else y.new_empty((splits, m, n), dtype=torch.float32)
    fused(block, run, splits, y, parts)
    if splits > 1:
        _add_up[(triton.cdiv(m * n, 1024),)](
            parts, y if bias is None else bias, y, m * n, n, splits, bias is not None, 1024
        )


def _by_slices(flat: Tensor, y: Tensor, bias: Tensor | None, floats: Floats) -> None:
    k, n = flat.shape[1], y.shape[1]
    step = min(n, max(1, SLICE // (flat.element_size() * k * TILE_ROWS)) * TILE_ROWS)
    held = flat.new_empty((step, k))
    beside = None if bias is None else bias.to(flat.dtype)
    for start in range(0, n, step):
        stop = min(start + step, n)
        floats(start, stop, held)
        w, out = held[: stop - start].t(), y[:, start:stop]
        if beside is None:
            torch.mm(flat, w, out=out)
        else:
            torch.addmm(beside[start:stop], flat, w, out=out)


def _grid(flat: Tensor, n: int, block: Block, splits: int) -> tuple[int, int]:
    return triton.cdiv(flat.shape[0], block.tokens) * triton.cdiv(n, block.rows), splits


def _options(block: Block) -> dict[str, int]:
    stages = 2 if torch.version.hip else block.stages  # LDS holds less
    return {"num_warps": block.warps, "num_stages": stages}


def _rows(x: Tensor) -> Tensor:
    """[M, K], each row without gaps; copied only where it has them."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
