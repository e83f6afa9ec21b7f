"""Products with LoRA inside on a GPU; test_low_rank_emulated.py is the same without one."""

from __future__ import annotations

import pytest
import torch

from accelpatch.kernels.hip.low_rank import SUFFIX, LowRank
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear, by_hip, reference
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from tests.support.hip_gemv import Launched
from tests.support.low_rank import check_low_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", ["plain", "int8", "int4_g128_minimum", "int4_g32_minimum", "int4_g32", "nf4_g64"])
def test_adapters_inside_a_product(name: str) -> None:
    torch.manual_seed(0)
    assert check_low_rank(Launched(SUFFIX), name, torch.bfloat16, meets=torch.version.hip is None) == []


@pytest.mark.parametrize("rows", [1, 8])
def test_the_same_words_serve_launch_after_launch(rows: int) -> None:
    """Of a captured graph too: 1,000 replays, each of four launches that share their words with none."""
    torch.manual_seed(0)
    n, k, rank = 4096, 4096, 16
    weight = (torch.randn(n, k) / 64).cuda().bfloat16()
    down, up = (torch.randn(rank, k) / 64).cuda().bfloat16(), (torch.randn(n, rank) / 4).cuda().bfloat16()
    low = LowRank(down, up)
    layers = [AdaptedLinear(FusedLinear(Plain(weight)), LowRank(down, up, (0,), low.new_words())) for _ in range(4)]
    x = torch.randn(rows, k).cuda().bfloat16()
    first = [by_hip(layer, x, None, None, None) for layer in layers]
    in_double = AdaptedLinear(FusedLinear(Plain(weight.double())), LowRank(down.double(), up.double()))
    due = reference(in_double, x.double())
    assert all(torch.equal(one, first[0]) for one in first)
    assert ((first[0] - due).norm() / due.norm()).item() < 0.01
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [by_hip(layer, x, None, None, None) for layer in layers]
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, first[0]) for one in found)
