"""Prompts by fused layers: the cache that they leave, prompts that go on, and lengths that come again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from tests.fusion.test_fused_layer import (  # noqa: F401
    OPTIONS,
    RECIPES,
    _as_on_a_gpu,
    assert_tokens_of_the_stock_loop,
    patched,
    paths,
)
from tests.support.tiny import full_batch, padded_batch


def assert_the_same_cache(model: Any, batch: dict[str, Tensor]) -> None:
    """Keys and values after a call are those of the stock loop, also under the padding."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    mine, its = (
        one.generate(**batch, **OPTIONS, return_dict_in_generate=True).past_key_values for one in (model, plain)
    )
    assert mine.get_seq_length() == its.get_seq_length()
    shown = batch["attention_mask"].bool()
    for one, other in zip(mine.layers, its.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        for held, due in ((one.keys, other.keys), (one.values, other.values)):
            first = due.shape[2] - (batch["input_ids"].shape[1] + OPTIONS["max_new_tokens"] - 1)
            seen = shown[:, max(0, -first) :] if first < 0 else shown
            of_prompt = [t[:, :, : seen.shape[1]].transpose(1, 2)[seen] for t in (held, due)]
            torch.testing.assert_close(*of_prompt, rtol=1e-4, atol=1e-5)
            assert bool(held.isfinite().all())


@pytest.mark.parametrize("make", [full_batch, padded_batch], ids=["one-length", "left-padding"])
@pytest.mark.parametrize("window", [None, 4], ids=["no-window", "window"])
def test_the_cache_after_a_prompt(make: Any, window: int | None) -> None:
    model = patched("mistral", sliding_window=window)
    assert_the_same_cache(model, make())
    assert paths(model)[FUSED_PROMPT] == 1


def test_a_prompt_that_goes_on_is_the_models_own() -> None:
    model = patched()
    batch = full_batch()
    first = model.generate(**batch, **OPTIONS, return_dict_in_generate=True)
    more = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
    mine = model.generate(more, past_key_values=first.past_key_values, **OPTIONS)
    assert torch.equal(mine, model.generate(more, **OPTIONS))
    assert paths(model)[FUSED_PROMPT] == 2
    assert paths(model)["prefill by modules: the cache holds tokens already"] == 1


def captured(model: Any) -> list[int]:
    """The captured lengths of all steps."""
    made = [step.prompts for step in vars(model)[RUNTIME].captured._steps.values() if step.prompts is not None]
    return [length for prompts in made for (_, length), one in prompts._captured.items() if one._graph is not None]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_length_that_comes_again_is_captured(recipe: str, rows: int) -> None:
    model = patched("llama", recipe)
    for length in (5, 9, 32, 1, 40, 64, 33, 120):
        ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(length))
        assert_tokens_of_the_stock_loop(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert captured(model) == [32, 64]
    assert paths(model)[FUSED_PROMPT] == 8


def test_a_call_that_comes_again_gives_the_same_bits() -> None:
    model, ids = patched(), torch.randint(2, 100, (1, 9), generator=torch.Generator().manual_seed(1))
    first, *others = (
        model.generate(
            ids, attention_mask=torch.ones_like(ids), **OPTIONS, output_logits=True, return_dict_in_generate=True
        )
        for _ in range(3)
    )
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first.logits, other.logits, strict=True))


def test_padding_and_many_tokens_are_not_captured() -> None:
    model = patched()
    long = torch.randint(2, 100, (2, 257), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.generate(**padded_batch(), **OPTIONS)
        model.generate(long, attention_mask=torch.ones_like(long), max_new_tokens=2, do_sample=False)
    assert captured(model) == []
    assert paths(model)[FUSED_PROMPT] == 6


def test_few_captured_lengths_are_kept() -> None:
    model = patched()
    for length in (10, 10, 60, 60, 100, 100, 140, 140, 200, 200):
        ids = torch.ones(1, length, dtype=torch.int64)
        model.generate(ids, attention_mask=ids, max_new_tokens=2, do_sample=False)
    assert captured(model) == [64, 128, 192, 256]
