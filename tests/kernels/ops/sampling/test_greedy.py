"""The token of the highest score: torch's own choice, by the Triton kernel on a GPU or through the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.ops.sampling import greedy
from tests.support.interpreted import DEVICE, HERE, here, interpret, needs_triton
from tests.support.spread import spread


@needs_triton
@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def scores_of(kind: str, rows: int, vocabulary: int) -> Tensor:
    scores = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    if kind == "ties":
        scores = scores.round()
    elif kind == "zeros":
        scores = torch.zeros(rows, vocabulary)
        scores[:, ::2] = -0.0
    elif kind == "nan":
        scores[:, vocabulary // 2 :] = float("nan")
        scores[:, 0] = float("inf")
    elif kind == "last":
        scores[:, -1] = 100.0
    elif kind == "none":
        scores.fill_(float("-inf"))
    elif kind == "low":
        scores = -scores.abs() - 1e30
    return scores.to(DEVICE)


SIZES = [(1, 32000), (3, 49152), (2, 7), (1, 1025), (2, 262144), (8, 1000)]  # rows, vocabulary
KINDS = ["random", "ties", "zeros", "nan", "last", "none", "low"]


@here
@spread("kind, size, ending", KINDS, SIZES, {"endless": False, "ends": True})
def test_the_same_as_torch(kind: str, size: tuple[int, int], ending: bool) -> None:
    from accelpatch.kernels.triton import greedy as kernel

    rows, vocabulary = size
    scores = scores_of(kind, rows, vocabulary)
    ends = torch.zeros(vocabulary + 1, dtype=torch.bool, device=DEVICE)
    ends[scores[0].argmax()] = True
    pad = torch.tensor([-1 if kind == "low" else 6], device=DEVICE)
    found, arrived = [], torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    for run in (greedy.reference_, kernel.greedy_, kernel.greedy_):  # again with the counters that it left
        unfinished = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        unfinished[1:2] = False
        tokens, report = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.zeros(rows + 1, dtype=torch.int64)
        report = report.to(DEVICE)
        counted = () if run is greedy.reference_ else (arrived,)
        run(scores, unfinished, ends if ending else None, pad, tokens, report, *counted)
        found.append((tokens, report, unfinished))
    for due, *mine in zip(*found, strict=True):
        assert all(torch.equal(due, one) for one in mine)
    assert not arrived.any()


def test_on_a_cpu() -> None:
    tokens, report = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    unfinished, ends = torch.tensor([True, True]), torch.tensor([False, True, False, False])
    scores = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    greedy.greedy_(scores, unfinished, ends, torch.tensor([2]), tokens, report, torch.zeros(2).int())
    assert (tokens.tolist(), report.tolist(), unfinished.tolist()) == ([1, 0], [1, 0, 1], [False, True])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows, vocabulary", [(1, 32000), (8, 152000)])
def test_a_hundred_launches_in_a_graph(rows: int, vocabulary: int) -> None:
    drawn = torch.randn(100, rows, vocabulary // 10, device="cuda").bfloat16().float().repeat(1, 1, 10)  # ties
    due, scores = drawn.argmax(-1).cpu(), torch.zeros(rows, vocabulary, device="cuda")
    unfinished, pad = torch.ones(rows, dtype=torch.bool, device="cuda"), torch.zeros(1, device="cuda").long()
    tokens, report = pad.repeat(rows), pad.repeat(rows + 1)
    state = (scores, unfinished, None, pad, tokens, report, torch.zeros(rows, device="cuda").int())
    graph, found = torch.cuda.CUDAGraph(), []
    greedy.greedy_(*state)
    with torch.cuda.graph(graph):
        greedy.greedy_(*state)
    for one in drawn:  # each in another order of its programs
        scores.copy_(one)
        graph.replay()
        found.append(report.clone())
    made = torch.stack(found).cpu()
    assert torch.equal(made[:, :-1], due)
    assert bool((made[:, -1] == 1).all())
