"""The token of the highest score: torch's own choice, by the Triton kernel on a GPU or through the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.kernels import greedy
from tests.interpreted import DEVICE, HERE, here, interpret, needs_triton


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
    elif kind == "none":
        scores.fill_(float("-inf"))
    elif kind == "low":
        scores = -scores.abs() - 1e30
    return scores.to(DEVICE)


@here
@pytest.mark.parametrize("ending", [False, True], ids=["endless", "ends"])
@pytest.mark.parametrize("rows, vocabulary", [(1, 32000), (3, 49152), (2, 7), (1, 8193), (8, 1000)])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "nan", "none", "low"])
def test_the_same_as_torch(kind: str, rows: int, vocabulary: int, ending: bool) -> None:
    from accelpatch.kernels.triton import greedy as kernel

    scores = scores_of(kind, rows, vocabulary)
    ends = torch.zeros(vocabulary + 1, dtype=torch.bool, device=DEVICE)
    ends[scores[0].argmax()] = True
    pad = torch.tensor([-1 if kind == "low" else 6], device=DEVICE)
    found = []
    for run in (greedy.reference_, kernel.greedy_):
        unfinished = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        unfinished[1:2] = False
        tokens, report = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.zeros(rows + 1, dtype=torch.int64)
        report = report.to(DEVICE)
        run(scores, unfinished, ends if ending else None, pad, tokens, report)
        found.append((tokens, report, unfinished))
    for due, mine in zip(*found, strict=True):
        assert torch.equal(due, mine)


def test_on_a_cpu() -> None:
    tokens, report = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    unfinished, ends = torch.tensor([True, True]), torch.tensor([False, True, False, False])
    scores = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    greedy.greedy_(scores, unfinished, ends, torch.tensor([2]), tokens, report)
    assert (tokens.tolist(), report.tolist(), unfinished.tolist()) == ([1, 0], [1, 0, 1], [False, True])
