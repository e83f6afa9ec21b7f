"""The GEMV that one would write in Triton, as a peer of the HIP kernels: y[N] = w[N, K] . x[K], accumulated in float32.

A program takes some rows and walks along K in wide blocks; each tile of `TILES` is tried and the fastest counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Rows of a program, values of K at a time, warps, and blocks that are read ahead (1: none)."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (
    Tile(2, 2048, 4, 1), Tile(4, 1024, 4, 1), Tile(8, 512, 4, 1), Tile(16, 256, 4, 1), Tile(4, 2048, 8, 1),
    Tile(8, 1024, 8, 1), Tile(16, 512, 4, 1), Tile(4, 1024, 4, 3), Tile(8, 512, 4, 3),
)  # fmt: skip


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


def rows_of(x: Tensor, w: Tensor, scale: Tensor | None, tile: Tile) -> Tensor:
    """y[1, N] of x[1, K] and a plain w[N, K], bf16, or int8 with scale[N]."""
    n, k = w.shape
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    _rows_of[(triton.cdiv(n, tile.rows),)](
        x, w, scale, y, n, k, SCALED=scale is not None, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return y
