"""Where captured steps end: what the stock loop runs and why, changed models, threads, failures, the way back."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MaxLengthCriteria, StaticCache, StoppingCriteriaList

import accelpatch
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.fused_forward import FORWARD
from accelpatch.runtime.graphs.step import CAPTURED
from tests.runtime.graphs.test_step import GREEDY, both, patched, paths, reasons, stock
from tests.support.streaming import Calling
from tests.support.tiny import CAUSAL, full_batch, padded_batch


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]


def one_row() -> dict[str, Any]:
    return {key: value[:1] for key, value in full_batch().items()}


STOCK: dict[str, tuple[dict[str, Any], str]] = {
    "hidden-states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "the argument output_hidden_states",
    ),
    "no-cache": ({"use_cache": False}, "no cache"),
}


@pytest.mark.parametrize("case", STOCK)
def test_the_stock_loop_with_its_reason(case: str) -> None:
    options, reason = STOCK[case]
    model = patched()
    mine, its = both(model, padded_batch(), **GREEDY, **options)
    mine, its = (made if isinstance(made, torch.Tensor) else made.sequences for made in (mine, its))
    assert torch.equal(mine, its)
    found = paths(model)
    assert found.pop(FORWARD) + found.pop(CAPTURED, 0) == GREEDY["max_new_tokens"]
    assert found == {f"stock loop: {reason}": 1}


@pytest.mark.parametrize("setting", ["graph: off", "cache: stock"])
def test_a_recipe_that_wants_no_capture(setting: str) -> None:
    model = patched(recipe=parse(f"extends: exact\nruntime: {{{setting}}}"))
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    assert paths(model) == {f"stock loop: the recipe says {setting}": 1}


def test_a_static_cache_of_the_users_own() -> None:
    model = patched()
    cache = StaticCache(config=model.config, max_cache_len=64)
    due = stock(model).generate(**full_batch(), **GREEDY)
    assert torch.equal(model.generate(**full_batch(), **GREEDY, past_key_values=cache), due)
    assert reasons(model) == ["stock loop: the cache is a StaticCache"]


def test_hooks_are_served_and_capture_returns_after_them() -> None:
    model, seen = patched(), []
    for module, reason in ((model.model.layers[1].mlp, "an inner module"), (model, "the model")):
        model.generate(**full_batch(), **GREEDY)
        seen.clear()
        hook = module.register_forward_hook(lambda *given: seen.append(1))
        model.generate(**full_batch(), **GREEDY)
        hook.remove()
        assert len(seen) == 24
        assert paths(model)[f"stock loop: a hook on {reason}"] == 1
    model.generate(**full_batch(), **GREEDY)
    assert paths(model)[CAPTURED] == 5 * 23  # the stock loop's calls of one token are captured steps too


def test_what_transformers_leaves_after_a_call_for_hidden_states_is_no_hook_of_the_users() -> None:
    model = patched()
    due = model.generate(**full_batch(), **GREEDY)
    type(model).unpatched_class.forward(model, **full_batch(), output_hidden_states=True)  # by the modules
    seen = model.generate(**full_batch(), **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert len(seen.hidden_states) == 24
    steps = list(vars(model)[RUNTIME].captured._steps.values())
    assert torch.equal(model.generate(**full_batch(), **GREEDY), due)
    assert list(vars(model)[RUNTIME].captured._steps.values()) == steps  # nothing was captured anew
    due = {CAPTURED: 2 * 23, "stock loop: the argument output_hidden_states": 1, FORWARD: 24}
    assert paths(model) == due


def test_of_two_lengths_the_shorter_one_ends() -> None:
    model = patched()
    length = full_batch()["input_ids"].shape[1]
    criteria = StoppingCriteriaList([MaxLengthCriteria(length + 9), MaxLengthCriteria(length + 3)])
    mine, its = both(model, full_batch(), **GREEDY, stopping_criteria=criteria)
    assert torch.equal(mine, its)
    assert mine.shape[1] == length + 3


def test_a_changed_model_is_captured_anew() -> None:
    model = patched()
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    model.model.norm.weight = nn.Parameter(torch.linspace(-2, 2, 64))
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    model.model.layers[0].input_layernorm.variance_epsilon = 5.0  # a plain number that the step took for granted
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    model.set_attn_implementation("eager")
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    model.set_attn_implementation("sdpa")  # eager attention of padded rows is NaN in float64
    model.to(torch.float64)
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    assert paths(model) == {CAPTURED: 5 * 23}


class Refusing(EagerGraph):
    """Fails like a capture that met a copy to the host; counts how often it was tried."""

    tried = 0

    def __init__(self, *given: Any):
        Refusing.tried += 1
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_a_capture_that_fails_is_tried_once_and_leaves_the_stock_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", Refusing)  # type: ignore[arg-type]
    monkeypatch.setattr(Refusing, "tried", 0)
    model = patched()
    for _ in range(3):
        mine, its = both(model, padded_batch(), max_new_tokens=24, do_sample=True)
        assert torch.equal(mine, its)
    why = "its step cannot be captured (RuntimeError: operation not permitted when stream is capturing)"
    assert paths(model) == {f"stock loop: {why}": 3}
    assert Refusing.tried == 2  # with fused layers, and with the modules
    assert vars(model)[RUNTIME].captured._steps == {}


def test_memory_that_runs_out_frees_the_other_steps_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    model.generate(**one_row(), **GREEDY)
    full = [True]

    class Short(EagerGraph):
        def __init__(self, *given: Any):
            if full.pop():
                full.append(False)
                raise torch.OutOfMemoryError("no room")
            full.append(False)
            super().__init__(*given)

    monkeypatch.setitem(capture.GRAPHS, "cpu", Short)  # type: ignore[arg-type]
    assert torch.equal(*both(model, padded_batch(), **GREEDY))
    assert [rows for rows, *_ in vars(model)[RUNTIME].captured._steps] == [3]


def test_an_exception_in_a_streamer_leaves_the_model_usable() -> None:
    def fail() -> None:
        raise RuntimeError("the reader is gone")

    model = patched()
    due = stock(model).generate(**one_row(), **GREEDY)
    with pytest.raises(RuntimeError, match="the reader is gone"):
        model.generate(**one_row(), **GREEDY, streamer=Calling(fail))
    assert torch.equal(model.generate(**one_row(), **GREEDY), due)
    assert reasons(model) == []


def test_generate_from_within_a_streamer() -> None:
    model, inner = patched(), []
    due = stock(model).generate(**one_row(), **GREEDY)
    streamer = Calling(lambda: inner.append(model.generate(**padded_batch(), **GREEDY)))
    assert torch.equal(model.generate(**one_row(), **GREEDY, streamer=streamer), due)
    assert torch.equal(inner[0], stock(model).generate(**padded_batch(), **GREEDY))
    assert reasons(model) == ["stock loop: generate() within generate()"]


def test_two_threads_stream_one_after_the_other() -> None:
    model, inputs = patched(), [one_row(), padded_batch()]
    due = [stock(model).generate(**batch, **GREEDY) for batch in inputs]
    wrong: list[int] = []

    def many(index: int) -> None:
        for _ in range(5):
            if not torch.equal(model.generate(**inputs[index], **GREEDY), due[index]):
                wrong.append(index)

    threads = [threading.Thread(target=many, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert wrong == []
    assert paths(model) == {CAPTURED: 20 * 23}


def test_unpatching_frees_graphs_and_caches() -> None:
    model = patched()
    model.generate(**full_batch(), **GREEDY)
    step = next(iter(vars(model)[RUNTIME].captured._steps.values()))
    held = [weakref.ref(step), weakref.ref(step.cache.layers[0].keys), weakref.ref(step.batch.logits)]
    handle = model.accelpatch
    del step
    accelpatch.unpatch(model)
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert RUNTIME not in vars(model)
    assert handle.report().paths[CAPTURED] == 23
    assert type(model)._sample is type(CAUSAL["llama"].make())._sample


def test_a_single_call_that_goes_on_with_one_token_is_a_captured_step() -> None:
    model = patched()
    with torch.no_grad():
        cache = model(**full_batch(), use_cache=True).past_key_values
        found = model(input_ids=torch.full((3, 1), 5), past_key_values=cache).logits
        longer = torch.cat([full_batch()["input_ids"], torch.full((3, 1), 5)], dim=1)
        torch.testing.assert_close(found[:, -1], model(longer).logits[:, -1], rtol=1e-4, atol=1e-4)
    assert paths(model) == {FORWARD: 2, CAPTURED: 1}
