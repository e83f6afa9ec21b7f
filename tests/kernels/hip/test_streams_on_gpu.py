"""Streams of one process beside each other on a GPU: launches whose blocks wait for each other come to an end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from accelpatch.device import probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.ops.linear import float_linear
from tests.support.parity import bits

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use")]
SECONDS, REPLAYS, LAYERS = 1.5, 20, 8


@dataclass(frozen=True)
class Load:
    """A step's products and attention, of rows that have `slot` cached tokens each."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    slot: int


ONE, FEW, MANY = Load(1, 32, 32, 128, 2000), Load(12, 8, 4, 64, 900), Load(32, 32, 32, 128, 300)
BESIDE = {
    "both-fill-the-device": (MANY, MANY),
    "two-sizes-of-block": (MANY, FEW),
    "one-row-beside-many": (ONE, MANY),
    "wide-heads": (Load(8, 8, 8, 256, 900), FEW),
    "three": (ONE, FEW, MANY),
}


@pytest.fixture(scope="module", autouse=True)
def _there() -> None:
    shape = AttentionShape(1, 1, 64, 1.0, torch.ones(32))
    if HERE and (reason := attention.why_not(shape, torch.bfloat16, probe("cuda"))):
        pytest.skip(reason)


class Captured:
    """Layers of one load as a graph on a stream of its own."""

    def __init__(self, load: Load, seed: int):
        draw, options = torch.Generator("cuda").manual_seed(seed), {"device": "cuda", "dtype": torch.bfloat16}
        hidden = load.heads * load.size
        self.shape = AttentionShape(
            load.heads, load.kv_heads, load.size, load.size**-0.5,
            (10000 ** (-torch.arange(0, load.size, 2) / load.size)).cuda(),
        )  # fmt: skip
        self.x = torch.randn(load.rows, hidden, generator=draw, **options)
        columns = (self.shape.columns, hidden)
        self.qkv, self.o = (torch.randn(n, hidden, generator=draw, **options) / hidden**0.5 for n in columns)
        cache = (load.rows, load.kv_heads, load.slot + 64, load.size)
        self.keys, self.values = (torch.randn(cache, generator=draw, **options) for _ in range(2))
        self.slot = torch.full([load.rows], load.slot, device="cuda")
        self.positions = self.slot[:, None].clone()
        self.mask = torch.ones(load.rows, load.slot + 64, dtype=torch.int64, device="cuda")
        self.y = torch.zeros_like(self.x)
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), binding.weight_prefetch():
            self.step()
            torch.cuda.synchronize()
            self.due = self.y.clone()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        x = self.x * 1
        for _ in range(LAYERS):
            held = (self.positions, self.slot, self.mask, self.keys, self.values, self.shape, self.o)
            x = float_linear.by_hip(attention.decode_attention_(float_linear.by_hip(x, self.qkv), *held), self.o)
        self.y.copy_(x)

    def replays(self, until: float) -> int:
        done = 0
        with torch.cuda.stream(self.stream):
            while time.monotonic() < until:
                for _ in range(REPLAYS):
                    self.graph.replay()
                self.stream.synchronize()
                assert torch.equal(bits(self.y), bits(self.due))
                done += REPLAYS
        return done


@pytest.mark.parametrize("loads", BESIDE.values(), ids=BESIDE)
def test_each_gets_the_bits_that_it_gets_alone(loads: tuple[Load, ...]) -> None:
    all_of_them = [Captured(load, seed) for seed, load in enumerate(loads)]
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(len(all_of_them)) as pool:
        assert all(pool.map(lambda one: one.replays(until), all_of_them))
