"""The tiled int4 layout: a hand-computed place, and both ways back."""

from __future__ import annotations

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, E8M0, scale_dtype
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


def powers(*shape: int) -> torch.Tensor:
    """float8_e8m0fnu of every byte that is a number, over and over."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 255).to(torch.uint8).view(shape).view(E8M0)


def test_the_values_of_e2m1() -> None:
    """Sign, two bits of exponent, one of fraction; no exponent: halves."""
    values = [(code & 1 | 2) * 2.0 ** ((code >> 1 & 3) - 2) if code & 6 else (code & 1) / 2 for code in range(8)]
    assert CODEBOOKS["e2m1"] == (*values, *(-value for value in values))
    assert [scale_dtype(codes) for codes in CODEBOOKS] == [torch.float32, torch.float32, E8M0, E4M3]


@pytest.mark.parametrize("n, k", [(48, 576), (33, 1056)], ids=str)
def test_scales_of_e2m1_come_back(n: int, k: int) -> None:
    """Every power of two, in one table of bfloat16 that holds them exactly."""
    q, scale = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8), powers(n, k // 32)
    tiles = Tiles.pack(q, scale, codes="e2m1")
    assert (tiles.scale.dtype, tiles.offset, tiles.kind, tiles.group) == (torch.bfloat16, None, "e2m1", 32)
    table = scale.float().bfloat16()
    assert torch.equal(tiling.untile_scales(tiles.scale, n, k // 32), table)
    assert torch.equal(table.double().log2() + 127, scale.view(torch.uint8).double())
    rows = tiles.canonical()
    assert (rows.codes, rows.offset, rows.scale.dtype) == ("e2m1", None, E8M0)
    assert torch.equal(rows.w, q)
    assert torch.equal(rows.scale.view(torch.uint8), scale.view(torch.uint8))


def test_gate_and_up_of_e2m1_come_apart() -> None:
    q, scale = torch.randint(-128, 128, (96, 64), dtype=torch.int8), powers(96, 4)
    both = Tiles.pack(q[:48], scale[:48], codes="e2m1").pair(Tiles.pack(q[48:], scale[48:], codes="e2m1"))
    for part, rows in (("gate", slice(48)), ("up", slice(48, 96))):
        one = both.replace(n=48, part=part).canonical()
        assert torch.equal(one.w, q[rows])
        assert torch.equal(one.scale.view(torch.uint8), scale[rows].view(torch.uint8))


@pytest.mark.parametrize(
    "scale, message",
    [
        (powers(16, 4), "groups are 32 of"),
        (powers(16, 8).float(), "scales are torch.float8_e8m0fnu"),
    ],
    ids=["groups of 64", "float32"],
)
def test_what_is_no_e2m1_of_tiles(scale: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Tiles.pack(torch.zeros(16, 128, dtype=torch.int8), scale, codes="e2m1")


def test_a_codebook_without_a_gpu_kernel_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only torch and the CPU read: a plan for a GPU says so."""
    monkeypatch.setitem(CODEBOOKS, "log4", CODEBOOKS["fp4"])
    assert int4_tiles.unfit(128, 32, torch.float32, "log4") == "no GPU kernel has the table log4"
    assert int4_tiles.unfit(128, 32, torch.float32, "fp4") is None
