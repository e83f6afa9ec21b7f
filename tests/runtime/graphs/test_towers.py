"""Towers of models that see, as captured calls: what they make of the sizes of pictures is no part of the graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.calls import CALL, FAILURES, RUNS
from accelpatch.runtime.graphs.constants import Constants
from tests.runtime.generation.test_multimodal import MODELS, pair
from tests.support.refusing import RefusingGraph

QWEN = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
# Their towers look at masks on the host, which are made of the pixels.
BY_MODULES = {"idefics3", "smolvlm", "gemma4"}
GRIDS = ([[1, 4, 4]], [[1, 2, 8]], [[1, 8, 8]], [[1, 4, 4], [1, 4, 8]], [[2, 4, 8]], [[1, 8, 4], [1, 4, 8]])


@pytest.fixture(autouse=True)
def _as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", RefusingGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")


def refused(model: Any) -> list[str]:
    return [path for path in model.accelpatch.report().paths if path.startswith("no captured call")]


def captured(model: Any) -> int:
    return int(model.accelpatch.report().paths.get(CALL, 0))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prompts_with_a_captured_tower(name: str) -> None:
    plain, model = pair(name)
    given = MODELS[name][1](1)
    for seed in range(RUNS + 3):
        for key in given.keys() & {"pixel_values", "input_features"}:
            draw = torch.Generator().manual_seed(seed)
            given[key] = torch.rand(given[key].shape, generator=draw)
        due, found = (one(**copy.deepcopy(given)).logits for one in (plain, model))
        torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
    assert bool(captured(model)) == (name not in BY_MODULES)
    assert sum(model.accelpatch.report().paths[one] for one in refused(model)) == (name in BY_MODULES), "tried again"


def patches(grid: list[list[int]], seed: int) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(grid)
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 4 * 4, generator=draw), sizes


@pytest.mark.parametrize("name", QWEN)
@torch.no_grad()
def test_every_grid_has_a_graph_of_its_own(name: str) -> None:
    """Grids of as many patches in another form, of several pictures, and of several frames, one after the other."""
    plain, model = pair(name)
    for turn in range(RUNS + 2):
        for grid in GRIDS:
            pixels, sizes = patches(grid, turn)
            due, found = (one.model.visual(pixels, grid_thw=sizes) for one in (plain, model))
            assert type(found) is type(due)
            for key in due:
                torch.testing.assert_close(found[key], due[key], rtol=1e-4, atol=1e-5)
    assert captured(model) == 2 * len(GRIDS)
    assert not refused(model)


@torch.no_grad()
def test_a_tower_that_cannot_be_captured_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Failing(RefusingGraph):
        def __init__(self, *given: Any) -> None:
            tried.append(1)
            raise RuntimeError("no graph")

    plain, model = pair("qwen2.5-vl")
    pixels, sizes = patches([[1, 8, 8]], 0)
    monkeypatch.setitem(capture.GRAPHS, "cpu", Failing)  # type: ignore[arg-type]
    for _ in range(RUNS + 4):
        found = model.model.visual(pixels, grid_thw=sizes)
    assert torch.equal(found.pooler_output, plain.model.visual(pixels, grid_thw=sizes).pooler_output)
    assert len(tried) == 1


@torch.no_grad()
def test_a_run_with_an_error_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def failing(self: Constants, program: Any) -> Any:
        tried.append(1)
        raise RuntimeError("not as the modules")

    _, model = pair("qwen2.5-vl")
    pixels, sizes = patches([[1, 8, 8]], 0)
    monkeypatch.setattr(Constants, "learn", failing)
    for _ in range(RUNS + FAILURES + 3):
        model.model.visual(pixels, grid_thw=sizes)
    assert len(tried) == FAILURES
