"""Requests that unpatch a model while it is called: by other threads, within a call, of copies of a call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.runtime.code_watch import CODE
from tests.support.first_use import on_demand
from tests.support.tiny import CAUSAL, full_batch

RECIPES = ("exact", "int8", "flash")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_request_waits_for_the_calls_of_other_threads(recipe: str) -> None:
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    with torch.no_grad():
        due = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False)(ids).logits
    inside, asked, found = threading.Event(), threading.Event(), []

    def stop(*args: Any) -> None:
        inside.set()
        asked.wait(5)

    def call() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)

    with on_demand(recipe) as said:
        with torch.no_grad():
            model(ids)
        handle = model.model.layers[1].register_forward_pre_hook(stop)
        thread = threading.Thread(target=call)
        thread.start()
        assert inside.wait(20)
        other = threading.Thread(target=lambda: model(ids, labels=ids).loss.backward())
        other.start()
        other.join(0.5)
        assert other.is_alive()
        assert said == []
        asked.set()
        thread.join()
        other.join()
        handle.remove()
    torch.testing.assert_close(found[0], due, rtol=1e-5, atol=1e-6)
    assert said == ["unpatched, since the script asked for a gradient"]
    assert model.model.embed_tokens.weight.grad is not None


def test_threads_that_ask_at_once_unpatch_once() -> None:
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    with on_demand("int8") as said:
        model.generate(ids, max_new_tokens=2, do_sample=False)
        start, found = threading.Barrier(4), []

        def ask() -> None:
            start.wait()
            found.append(len(model.state_dict()))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == ["unpatched, since the script asked for state_dict"]
    assert found == [len(CAUSAL["llama"].make().state_dict())] * 4


def test_a_request_within_generate_waits_for_nobody() -> None:
    """A streamer, a processor or a criterion of the script asks between two steps."""
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    due = CAUSAL["llama"].make().generate(ids, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    sizes: list[int] = []

    def criterion(*args: Any, **kwargs: Any) -> Tensor:
        sizes.append(len(list(model.parameters())))
        return torch.zeros(len(ids), dtype=torch.bool)

    with on_demand("exact") as said:
        model.generate(ids, max_new_tokens=2, do_sample=False)
        found = model.generate(ids, max_new_tokens=6, do_sample=False, stopping_criteria=[criterion])
    assert torch.equal(found, due)
    assert set(sizes) == {len(list(model.parameters()))}
    assert said == ["unpatched, since the script asked for its parameters"]


def test_copies_of_data_parallel_are_not_unpatched() -> None:
    """Each call of DataParallel on several GPUs makes them; they share the original's attributes."""
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    with on_demand("flash") as said, torch.no_grad():
        nn.DataParallel(model)(ids)
        assert hasattr(model, "accelpatch")
        copy = model._replicate_for_data_parallel()
        with torch.enable_grad():
            copy(ids, labels=ids)
    assert said == []
    assert vars(model)[CODE] is vars(copy)[CODE]
