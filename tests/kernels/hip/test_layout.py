"""The tiled int4 layout: a hand-computed place, and both ways back."""

from __future__ import annotations

import pytest
import torch

from accelpatch.kernels.hip import layout


@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize("rows, columns", [(16, 128), (2, 64), (48, 576), (14, 1000)], ids=str)
def test_tiles_round_trip(rows: int, columns: int, paired: bool) -> None:
    q = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    tiles = layout.tile_int4(q, paired=paired)
    assert torch.equal(layout.untile_int4(tiles, rows, columns, paired=paired), q)


@pytest.mark.parametrize("row, k", [(0, 0), (3, 1), (9, 127), (15, 70), (17, 130)], ids=str)
def test_a_value_lies_where_the_kernel_looks(row: int, k: int) -> None:
    q = torch.zeros(32, 128, dtype=torch.int8)
    q[row, k // 2] = 5 << (4 * (k % 2))
    tiles = layout.tile_int4(q).view(torch.uint8)
    step, inside = divmod(k, 128)
    word, quarter, e = inside // 32, inside % 32 // 8, inside % 8
    nibble = e // 2 + 4 * (e % 2)
    byte = (4 * (row % 16) + quarter) * 16 + 4 * word + nibble // 2
    zeros = 0x88  # two codes of 0 are -8 twice, 5 is -3
    assert tiles[row // 16, step, byte] ^ zeros == 5 << (4 * (nibble % 2))
    assert (tiles != zeros).sum() == 1


@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize(
    "steps, groups, shift, count", [(5, 4, 0, 18), (32, 1, 0, 32), (86, 1, 1, 43), (9, 1, 30, 1)], ids=str
)
def test_scales_round_trip(steps: int, groups: int, shift: int, count: int, paired: bool) -> None:
    table = torch.randn(38, count, generator=torch.Generator().manual_seed(count)).bfloat16()
    tiles = layout.tile_scales(table, steps=steps, groups=groups, group_shift=shift, paired=paired)
    assert torch.equal(layout.untile_scales(tiles, 38, count, paired=paired), table)
