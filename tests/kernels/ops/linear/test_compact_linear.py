"""The product of a weight in 12 bits where it is undone some tiles at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.ops.linear import compact_linear
from tests.support.parity import assert_parity

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("part", ["all", "both", "gate", "up"])
@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_a_weight(device: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    w = (torch.randn(160, 100, generator=generator) / 10).bfloat16()
    w[77, :3] = 0.0
    tiles = CompactTiles.pack(w.to(device))
    if part != "all":
        tiles = tiles.pair().replace(n=160 if part == "both" else 80, part=part)
    x = torch.randn(70, 100, generator=generator).bfloat16().to(device)
    bias = torch.randn(tiles.n, generator=generator).bfloat16().to(device)
    made = []
    unpacked, run = (CompactTiles.unpack, "torch") if device == "cpu" else (compact_linear.unpacked, "hip_unpack")
    where: Any = CompactTiles if device == "cpu" else compact_linear
    monkeypatch.setattr(compact_linear, "BLOCK", 3 * 16 * 100)
    monkeypatch.setattr(where, unpacked.__name__, lambda tiles: made.append(tiles.n) or unpacked(tiles))
    assert_parity("compact_linear", (x, *tiles, bias), run)
    assert made[:4] == [48, 48, 48, 16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", ["all", "both", "gate", "up"])
@pytest.mark.parametrize(("n", "k"), [(64, 4096), (160, 1000), (96, 65), (3200, 520)])
def test_a_device_undoes_them_bit_for_bit(n: int, k: int, part: str) -> None:
    w = torch.randn(n, k, device="cuda").bfloat16()
    w[5], w[7, ::64], w[n - 1, k // 2] = -0.0, 1e-20, -1e30
    tiles = CompactTiles.pack(w)
    if part != "all":
        tiles = tiles.pair().replace(n=n if part == "both" else n // 2, part=part)
    want = {"gate": w[: n // 2], "up": w[n // 2 :]}.get(part, w)
    assert torch.equal(compact_linear.unpacked(tiles).view(torch.int16), want.view(torch.int16))
