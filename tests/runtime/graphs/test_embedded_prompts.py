"""Prompts with pictures and sounds, whose language model is given embeddings, as graphs by buckets of lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.cache_contents import storing
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture, embedded_prompts
from accelpatch.runtime.graphs.multimodal_parts import FORWARD
from tests.fusion.test_fused_layer import RECIPES
from tests.runtime.generation.test_multimodal import MODELS, both, pair
from tests.support.refusing import RefusingGraph

# Whose tokens see later ones, of the same picture or prefix, and one that has no fused layers.
UNCAPTURED = {"gemma3", "paligemma", "paligemma2", "gemma4"}


@pytest.fixture(autouse=True)
def _as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", RefusingGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")


def graphs(model: Any) -> list[tuple[int, int]]:
    """Rows and length of the captured prompts."""
    prompts = vars(model)[RUNTIME].captured._embedded
    return [] if prompts is None else [key[:2] for key, one in prompts._captured.items() if one._graph is not None]


def longer(given: dict[str, Any], more: int, seed: int) -> dict[str, Any]:
    """The arguments with other and more text behind the picture."""
    given, rows = copy.deepcopy(given), len(given["input_ids"])
    words = torch.randint(5, 100, (rows, more), generator=torch.Generator().manual_seed(seed))
    given["input_ids"] = torch.cat([given["input_ids"], words], dim=1)
    for key in given.keys() & {"attention_mask", "token_type_ids", "mm_token_type_ids"}:
        behind = torch.full((rows, more), int(key == "attention_mask"), dtype=given[key].dtype)
        given[key] = torch.cat([given[key], behind], dim=1)
    return given


def held(made: Any) -> list[Tensor]:
    return [tensor for layer in storing(getattr(made, CACHE)) for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prompts_of_any_length(name: str) -> None:
    """Logits of every token and what is cached, of the second row too, in the order long, short, long."""
    plain, model = pair(name)
    kept = []
    for turn, more in enumerate((9, 1, 5, 2, 8)):
        given = longer(MODELS[name][1](2), more, turn)
        due, found = (one(**copy.deepcopy(given), use_cache=True) for one in (plain, model))
        kept.append((found, due))
    for found, due in kept:  # a later call has not written what an earlier one returned
        torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-5)
        for mine, its in zip(held(found), held(due), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    assert bool(graphs(model)) == (name not in UNCAPTURED)


@pytest.mark.parametrize("recipe", ["exact", "int8"])
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_generating_behind_a_captured_prompt(name: str, recipe: str) -> None:
    plain, model = pair(name, RECIPES[recipe])
    for turn in range(3):
        both(plain, model, longer(MODELS[name][1](1), turn, turn))
    assert len(graphs(model)) == 1
    given = MODELS[name][1](2)
    given["attention_mask"][1, :2] = 0
    for _ in range(3):
        both(plain, model, given)
    assert len(graphs(model)) == 1, "a padded batch"


@torch.no_grad()
def test_prompts_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_prompts, "TOKENS", 40)
    plain, model = pair("llava")
    for more in (20, 20, 20, 1, 1):  # 45 and 26 tokens
        given = longer(MODELS["llava"][1](1), more, 0)
        torch.testing.assert_close(
            *(one(**copy.deepcopy(given)).logits for one in (model, plain)), rtol=1e-4, atol=1e-5
        )
    assert graphs(model) == [(1, 32)]


@torch.no_grad()
def test_a_prompt_that_cannot_be_captured_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = pair("qwen3-vl")
    tried: list[int] = []

    class Failing(RefusingGraph):
        def __init__(self, *given: Any) -> None:
            tried.append(1)
            raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setitem(capture.GRAPHS, "cpu", Failing)  # type: ignore[arg-type]
    given = MODELS["qwen3-vl"][1](1)
    given["inputs_embeds"] = torch.randn(1, given["input_ids"].shape[1], 64)
    decoder = [one.model.language_model for one in (plain, model)]
    for _ in range(5):
        due, found = (one(inputs_embeds=given["inputs_embeds"]).last_hidden_state for one in decoder)
        torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
    assert len(tried) == 1
    assert model.accelpatch.report().paths[FORWARD] == 5
