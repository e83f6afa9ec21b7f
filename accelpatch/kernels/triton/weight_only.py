"""Products of many rows with int8 and 4-bit weights: see ../int8_linear.py, ../tiled_int4_linear.py, ../hip/layout.py.

Up to some number of rows one kernel turns a block of the weight into x's dtype in registers and multiplies it, the
weight's rows as those of the matrix instruction; where the blocks are fewer than the device has room for, K is cut and
a second kernel adds the runs up, in a fixed order. For more rows the weight is written out as floats (dequantize.py)
and torch's own product takes it. Weights are rounded to x's dtype as in the references, but for an int8 scale in the
fused form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.hip.layout import TILE_VALUES
from accelpatch.kernels.int4_tiles import Tiles, places
from accelpatch.kernels.triton.dequantize import Floats, _beside, _value, by_slices, int4_floats, int8_floats
from accelpatch.kernels.triton.launch import on

HALVES = (torch.bfloat16, torch.float16)
PROGRAMS = 264  # blocks that a device should have to do: two for each multiprocessor of the one measured
LEAST_RUN = 512  # of K, where it is cut
KINDS = {"none": 0, "zero_point": 1, "minimum": 2}


@dataclass(frozen=True)
class Block:
    """What a program makes: `tokens` rows of x by `rows` of the weight, `columns` of K at a time (int8)."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Blocks:
    """of: the first whose tokens suffice, else the last. most: rows of x up to which this way was the faster one."""

    of: tuple[Block, ...]
    most: int


INT8 = Blocks(
    (Block(16, 64, 128, 4, 4), Block(32, 64, 128, 4, 4), Block(64, 64, 128, 4, 4), Block(128, 64, 64, 4, 4)), 256
)
INT4 = Blocks((Block(16, 64, 128, 4, 6), Block(32, 64, 128, 4, 4), Block(64, 128, 128, 8, 4)), 64)


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


@triton.jit(do_not_specialize=["steps"])
def _spread(x, out, k, x_stride, steps):  # type: ignore[no-untyped-def]
    """x[m, k] as out[m, steps, 8, 16]: value e of word i of a step, 0 behind the row's end."""
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, word = tl.arange(0, 8), tl.arange(0, 16)
    columns = (step * 128 + 32 * (word % 4) + 8 * (word // 4))[None, :] + e[:, None]
    values = tl.load(x + row * x_stride + columns, mask=columns < k, other=0.0)
    tl.store(out + (row * steps + step) * 128 + e[:, None] * 16 + word[None, :], values)


# whether these are multiples of 16 changes no instruction, and a kernel for each case would be compiled
@triton.jit(do_not_specialize=["m", "run", "steps", "sets", "shift"])
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
            value = _value(words, e, factor, beside, KIND)
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

    return _product(x, flat, n, bias, INT8, fused if groups == 1 else None, int8_floats(q, scale))


def tiled_int4_linear(x: Tensor, *args: object) -> Tensor:
    """As the operation, of tiles that are not paired; or of both that are, for so many rows that they are `written`."""
    *rest, bias = args
    assert bias is None or isinstance(bias, Tensor)
    w, scale, offset, n, k, group, kind, part = Tiles(*rest)  # type: ignore[arg-type]
    flat, words, scale = _rows(x), w.contiguous().view(torch.int32), scale.contiguous()
    beside = scale if offset is None else offset.contiguous()
    steps, groups, shift = places(k, group).values()
    sizes, form = (steps, scale.shape[1], shift), (KINDS[kind], group, groups)

    def fused(block: Block, run: int, splits: int, y: Tensor, parts: Tensor) -> None:
        spread = flat.new_empty((flat.shape[0], steps * TILE_VALUES))
        _spread[(flat.shape[0], steps)](flat, spread, k, flat.stride(0), steps, num_warps=1)
        _int4_product[_grid(flat, n, block, splits)](
            spread, words, scale, beside, y if bias is None else bias, y, parts, flat.shape[0], n,
            run // TILE_VALUES, *sizes, *form, bias is not None, splits > 1, block.tokens, block.rows,
            **_options(block),
        )  # fmt: skip

    paired = part == "both"
    floats = int4_floats(words, scale, beside, k, sizes, form, paired)
    return _product(x, flat, n, bias, INT4, None if paired else fused, floats, paired)


def written(m: int) -> bool:
    """Whether 4-bit weights are written out as floats for m rows of x."""
    return m > INT4.most


Fused = Callable[[Block, int, int, Tensor, Tensor], None]


def _product(
    x: Tensor, flat: Tensor, n: int, bias: Tensor | None, blocks: Blocks, fused: Fused | None, floats: Floats,
    paired: bool = False,
) -> Tensor:  # fmt: skip
    """y[..., n] by one of the two ways; fused(block, run, splits, y, parts), floats(start, stop, out)."""
    m = flat.shape[0]
    y = x.new_empty((m, n))
    if m:
        with on(x):
            if fused is not None and m <= blocks.most and x.dtype in HALVES:
                _fused(flat, y, bias, blocks.of, fused)
            else:
                by_slices(flat, y, bias, floats, paired)
    return y.view(*x.shape[:-1], n)


def _fused(flat: Tensor, y: Tensor, bias: Tensor | None, blocks: tuple[Block, ...], fused: Fused) -> None:
    (m, k), n = flat.shape, y.shape[1]
    block = next((one for one in blocks if one.tokens >= m), blocks[-1])
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


def _grid(flat: Tensor, n: int, block: Block, splits: int) -> tuple[int, int]:
    return triton.cdiv(flat.shape[0], block.tokens) * triton.cdiv(n, block.rows), splits


def _options(block: Block) -> dict[str, int]:
    stages = 2 if torch.version.hip else block.stages  # LDS holds less
    return {"num_warps": block.warps, "num_stages": stages}


def _rows(x: Tensor) -> Tensor:
    """[M, K], each row without gaps; copied only where it has them."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
