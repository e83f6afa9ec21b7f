"""The tiled int4 layout: a hand-computed place, and both ways back."""

from __future__ import annotations

import pytest
import torch

from accelpatch.kernels.layouts import int4_tiles, tiling
from accelpatch.kernels.layouts.int4_tiles import Tiles


@pytest.mark.parametrize("rows, columns", [(16, 128), (2, 64), (48, 576), (14, 1000)], ids=str)
def test_tiles_round_trip(rows: int, columns: int) -> None:
    q = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    tiles = tiling.tile_int4(q)
    assert torch.equal(tiling.untile_int4(tiles, rows, columns), q)


@pytest.mark.parametrize("row, k", [(0, 0), (3, 1), (9, 127), (15, 70), (17, 130)], ids=str)
def test_a_value_lies_where_the_kernel_looks(row: int, k: int) -> None:
    q = torch.zeros(32, 128, dtype=torch.int8)
    q[row, k // 2] = 5 << (4 * (k % 2))
    tiles = tiling.tile_int4(q).view(torch.uint8)
    step, inside = divmod(k, 128)
    word, quarter, e = inside // 32, inside % 32 // 8, inside % 8
    nibble = e // 2 + 4 * (e % 2)
    byte = (4 * (row % 16) + quarter) * 16 + 4 * word + nibble // 2
    zeros = 0x88  # two codes of 0 are -8 twice, 5 is -3
    assert tiles[row // 16, step, byte] ^ zeros == 5 << (4 * (nibble % 2))
    assert (tiles != zeros).sum() == 1


@pytest.mark.parametrize(
    "steps, groups, shift, count", [(5, 4, 0, 18), (32, 1, 0, 32), (86, 1, 1, 43), (9, 1, 30, 1)], ids=str
)
def test_scales_round_trip(steps: int, groups: int, shift: int, count: int) -> None:
    table = torch.randn(38, count, generator=torch.Generator().manual_seed(count)).bfloat16()
    tiles = tiling.tile_scales(table, steps=steps, groups=groups, group_shift=shift)
    assert torch.equal(tiling.untile_scales(tiles, 38, count), table)


@pytest.mark.parametrize("group", [32, 128, 256, 160])
@pytest.mark.parametrize("halves", [1, 2], ids=["in-one", "gate-and-up"])
def test_tiles_pair_and_come_apart(halves: int, group: int) -> None:
    k = 512 if group != 160 else 160
    q = torch.randint(-128, 128, (96, k // 2), dtype=torch.int8)
    scale, least = (torch.rand(2, 96, k // group) / 100).half()
    whole, cut = (
        Tiles.pack(q, scale, least),
        [Tiles.pack(*part) for part in zip(q.chunk(2), scale.chunk(2), least.chunk(2), strict=True)],
    )
    both = whole.pair() if halves == 1 else cut[0].pair(cut[1])
    steps, groups, shift = int4_tiles.places(k, group).values()
    tables = {"steps": steps, "groups": groups, "group_shift": shift}
    q, scale, least = (one.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2) for one in (q, scale, least))
    assert torch.equal(both.w, tiling.tile_int4(q))
    assert torch.equal(both.scale, tiling.tile_scales(scale, **tables))
    assert both.offset is not None
    assert torch.equal(both.offset, tiling.tile_scales(least, **tables))
    for part, due in (("both", whole), ("gate", cut[0]), ("up", cut[1])):
        found = both.replace(n=due.n, part=part).alone()
        assert all(torch.equal(one, due.tables[name]) for name, one in found.tables.items())
        assert found.arguments()[3:] == due.arguments()[3:]
