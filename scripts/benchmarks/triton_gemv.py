"""The GEMV that one would write in Triton, as a peer of the HIP kernels: y[N] = w[N, K] . x[K], accumulated in float32.

A program takes some rows and walks along K in wide blocks; each tile of `TILES` is tried and the fastest counts. int4
lies as suits it: in a group of 128 the low nibbles of its 64 bytes are the first 64 values, the high ones the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128  # of int4


class Tile(NamedTuple):
    """Rows of a program, values of K at a time, warps, and blocks that are read ahead (1: none)."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (
    Tile(2, 2048, 4, 1),
    Tile(4, 1024, 4, 1),
    Tile(8, 512, 4, 1),
    Tile(16, 256, 4, 1),
    Tile(4, 2048, 8, 1),
    Tile(8, 1024, 8, 1),
    Tile(16, 512, 4, 1),
    Tile(4, 1024, 4, 3),
    Tile(8, 512, 4, 3),
)


@triton.jit
def _rows_of(  # type: ignore[no-untyped-def]
    x, w, scale, y, n, k, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, k, COLUMNS, num_stages=STAGES):
        columns = at + tl.arange(0, COLUMNS)
        some = tl.load(x + columns, mask=columns < k, other=0.0).to(tl.float32)
        inside = (rows < n)[:, None] & (columns < k)[None, :]
        held = tl.load(w + rows[:, None] * k + columns[None, :], mask=inside, other=0, eviction_policy="evict_first")
        total += held.to(tl.float32) * some[None, :]
    found = tl.sum(total, 1)
    if SCALED:
        found *= tl.load(scale + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(y + rows, found.to(y.dtype.element_ty), mask=rows < n)


@triton.jit
def _int4_rows_of(  # type: ignore[no-untyped-def]
    x, q, scale, minimum, y, n, k,
    MINIMUM: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, 64)
    total = tl.zeros((ROWS, GROUPS, 64), tl.float32)
    for at in tl.range(0, k // 128, GROUPS, num_stages=STAGES):
        groups = at + tl.arange(0, GROUPS)
        there = groups < k // 128
        values = x + groups[:, None] * 128 + half[None, :]
        first = tl.load(values, mask=there[:, None], other=0.0).to(tl.float32)[None, :, :]
        second = tl.load(values + 64, mask=there[:, None], other=0.0).to(tl.float32)[None, :, :]
        inside = (rows < n)[:, None] & there[None, :]
        place = rows[:, None] * (k // 128) + groups[None, :]
        held = tl.load(
            q + place[:, :, None] * 64 + half[None, None, :], mask=inside[:, :, None], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        low, high = (held & 15).to(tl.float32), (held >> 4).to(tl.float32)
        if MINIMUM:
            least = tl.load(minimum + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
            total += (low * first + high * second) * factor + least * (first + second)
        else:
            total += ((low - 8) * first + (high - 8) * second) * factor
    tl.store(y + rows, tl.sum(tl.sum(total, 2), 1).to(y.dtype.element_ty), mask=rows < n)


def rows_of(x: Tensor, w: Tensor, scale: Tensor | None, tile: Tile) -> Tensor:
    """y[1, N] of x[1, K] and a plain w[N, K], bf16, or int8 with scale[N]."""
    n, k = w.shape
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _rows_of[(triton.cdiv(n, tile.rows),)](
        x, w, scale, y, n, k, SCALED=scale is not None, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return y


def int4_rows_of(x: Tensor, q: Tensor, scale: Tensor, minimum: Tensor | None, tile: Tile) -> Tensor:
    """y[1, N] of x[1, K] and q uint8 [N, K / 2], scale and minimum [N, K / 128].

    The weight is (u - 8) * scale, with a minimum u * scale + minimum. K is a multiple of 128. A tile's columns count
    bytes of int8: twice as many values here.
    """
    n, k = q.shape[0], q.shape[1] * 2
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _int4_rows_of[(triton.cdiv(n, tile.rows),)](
        x, q, scale, minimum, y, n, k, MINIMUM=minimum is not None, ROWS=tile.rows,
        GROUPS=max(tile.columns * 2 // GROUP, 1), STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return y


def int4_meaning(q: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """The float64 weight [N, K] that `int4_rows_of` multiplies with."""
    bytes_of = q.view(q.shape[0], -1, GROUP // 2)
    codes = torch.cat([bytes_of & 15, bytes_of >> 4], -1).double()
    wide = scale.double()[..., None]
    return ((codes - 8) * wide if minimum is None else codes * wide + minimum.double()[..., None]).flatten(1)
