"""Bfloat16 weights in 12 bits: the way back is bit for bit, whatever the values, or they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts import compact_tiles
from accelpatch.kernels.layouts.compact_tiles import NONE, CompactTiles

SIZES = [(1, 1), (5, 7), (16, 64), (37, 65), (48, 100), (64, 1000), (3, 4099)]


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(n, 1, generator=generator) * 3
    return (torch.randn(n, k, generator=generator) * spread).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(("n", "k"), SIZES, ids=[f"{n}x{k}" for n, k in SIZES])
def test_there_and_back(n: int, k: int) -> None:
    w = normal(n, k)
    tiles = CompactTiles.pack(w)
    assert same_bits(tiles.unpack(), w)
    assert tiles.w.shape == (-(-n // 16), -(-k // 64), 1536)
    assert (tiles.scale.flatten()[:n].frexp().mantissa == 0.5).all(), "powers of two"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda row: row.zero_(), id="zeros"),
        pytest.param(lambda row: row.mul_(-0.0), id="signed-zeros"),
        pytest.param(lambda row: row[:3].zero_(), id="some-zeros"),
        pytest.param(lambda row: row[5].fill_(1e38), id="one-far-above"),
        pytest.param(lambda row: row[5:8].fill_(1e-39), id="some-subnormal"),
        pytest.param(lambda row: row.mul_(1e-30), id="all-small"),
        pytest.param(lambda row: row.sign_().mul_(3e38), id="all-large"),
        pytest.param(lambda row: row[::64].fill_(1e-20), id="more-than-four"),
    ],
)
def test_values_outside_of_the_window(change: Callable[[Tensor], Tensor]) -> None:
    w = normal(32, 640)
    change(w[2])
    assert same_bits(CompactTiles.pack(w).unpack(), w)


def test_a_window_leaves_few_outside() -> None:
    """Of normally distributed values one in some 10,000."""
    tiles = CompactTiles.pack(normal(256, 4096))
    assert 0 < int((tiles.outliers != NONE).sum()) < 256 * 4096 // 5000


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        pytest.param(torch.full((2, 64), float("nan"), dtype=torch.bfloat16), "NaN", id="nan"),
        pytest.param(torch.tensor([[1.0, float("inf")]]).bfloat16(), "NaN or infinity", id="infinity"),
        pytest.param(torch.ones(2, 64), "bfloat16", id="float32"),
        pytest.param(torch.exp2(torch.arange(-60.0, 60.0)).bfloat16()[None], "binades", id="many-binades"),
        pytest.param(torch.ones(1, 0xFFFF).bfloat16(), "K = 65535", id="wide"),
    ],
)
def test_what_is_refused(weight: Tensor, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        CompactTiles.pack(weight)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40),
    n=st.integers(1, 20),
    k=st.integers(1, 130),
    seed=st.integers(0, 99),
)
def test_any_bits_come_back_or_are_refused(bits: list[int], n: int, k: int, seed: int) -> None:
    w = normal(n, k, seed)
    places = torch.randperm(n * k, generator=torch.Generator().manual_seed(seed))[: len(bits)]
    w.view(torch.int16).view(-1)[places] = torch.tensor(bits, dtype=torch.int32).to(torch.int16)[: len(places)]
    try:
        tiles = CompactTiles.pack(w)
    except KernelError:
        exponents = w.view(torch.int16) >> 7 & 255
        spread = exponents.amax(1) - exponents.amin(1)
        assert (spread > 15).any() or (exponents == 255).any() or (exponents == 0).any()
    else:
        assert same_bits(tiles.unpack(), w)


@pytest.mark.parametrize("part", ["both", "gate", "up"])
def test_paired(part: str) -> None:
    gate, up = normal(48, 200), normal(48, 200, 1)
    up[3, :6] = 1e-20
    both = CompactTiles.pack(gate).pair(CompactTiles.pack(up))
    want = {"both": torch.cat([gate, up]), "gate": gate, "up": up}[part]
    assert same_bits(both.replace(n=len(want), part=part).unpack(), want)
    one = CompactTiles.pack(torch.cat([gate, up])).pair()
    assert all(torch.equal(a, b) for a, b in zip(one.tables.values(), both.tables.values(), strict=True))


def test_blocks_of_rows_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w = normal(100, 320)
    w[70, ::50] = 0.0
    whole = CompactTiles.pack(w)
    monkeypatch.setattr(compact_tiles, "BLOCK", 20 * 320)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.tables.values(), CompactTiles.pack(w).tables.values(), strict=True)
    )
