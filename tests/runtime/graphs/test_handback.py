"""The cache of a call over captured steps: filled at its end for whoever can see it, and for nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import accelpatch
from accelpatch.recipe.recipe import parse
from accelpatch.runtime import cache_contents
from tests.support.drafting import as_on_a_gpu, generate, row, stock
from tests.support.streaming import Calling
from tests.support.tiny import CAUSAL

PLAIN = {"return_dict_in_generate": False}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    as_on_a_gpu(monkeypatch)
    return accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)


def assert_equal(mine: DynamicCache, due: DynamicCache) -> None:
    assert mine.get_seq_length() == due.get_seq_length() > 0
    for one, other in zip(mine.layers, due.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)


def test_a_cache_that_is_passed(model: Any) -> None:
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for runner, cache in zip((model, stock(model)), caches, strict=True):
        generate(runner, row(), past_key_values=cache, **PLAIN)
    assert_equal(*caches)


def test_a_cache_that_came_back_and_is_passed_again(model: Any) -> None:
    caches = []
    for runner in (model, stock(model)):
        first = generate(runner, row())
        caches.append(first.past_key_values)
        more = torch.cat([first.sequences, torch.tensor([[4]])], dim=1)
        generate(runner, more, past_key_values=caches[-1], **PLAIN)
    assert_equal(*caches)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("drafts", ["off", "prompt_lookup"])
@pytest.mark.parametrize("way", [{}, {"repetition_penalty": 1.3}], ids=["by-the-device", "by-the-host"])
def test_a_cache_that_is_passed_when_a_streamer_breaks_off(way: dict[str, Any], drafts: str, model: Any) -> None:
    recipe = parse(f"extends: exact\nruntime: {{speculate: {drafts}}}")
    mine = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for runner, cache in zip((mine, stock(model)), caches, strict=True):
        with pytest.raises(KeyboardInterrupt):
            generate(runner, row(), past_key_values=cache, streamer=Calling(interrupt), **way, **PLAIN)
    assert_equal(*caches)  # two new tokens were handed out, and one of them cached
    assert caches[0].get_seq_length() == row().shape[1] + 1
    assert not any(count < 0 for count in mine.accelpatch.report().paths.values())


@pytest.mark.parametrize(
    "way", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=["greedy", "sampling", "by-the-host"]
)
def test_a_cache_that_nobody_sees(way: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    tokens = cache_contents._tokens

    def counted(window: int, held: Any, length: int) -> Any:
        copied.extend([length] if length else [])
        return tokens(window, held, length)

    monkeypatch.setattr(cache_contents, "_tokens", counted)
    generate(model, row(), **way, **PLAIN)
    assert copied == []
    generate(model, row(), **way)
    assert copied == [9 + 23] * 2  # of each layer
