"""Captured steps behind stock generate(): the stock loop's tokens, cache and streams, and proof that they ran.

No graph is needed: the CPU is put into the table of graphs with the form that runs a program anew at each replay.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.fusion.fused_model import FUSED
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture, kv_cache, model_graphs
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.model_graphs import MODULES, CapturedModel
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.spread import spread
from tests.support.streaming import AtLength, Calling, Every
from tests.support.tiny import CAUSAL, full_batch, padded_batch

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "at-least": {"do_sample": False, "min_new_tokens": 20, "eos_token_id": [5, 9, 10**6], "pad_token_id": 0},
    "min-length": {"do_sample": True, "min_length": 22, "eos_token_id": list(range(60)), "pad_token_id": 0},
    "several-ends": {"do_sample": False, "eos_token_id": list(range(40)), "pad_token_id": 0},
}
BY_HOST: dict[str, dict[str, Any]] = {
    "repetition": {"do_sample": False, "repetition_penalty": 1.5},
    "sampling-no-repeats": {"do_sample": True, "no_repeat_ngram_size": 2, "top_k": 20},
    "time": {"do_sample": False, "max_time": 600.0},
}


class Counted(EagerGraph):
    """Counts the replays of each program."""

    replays: ClassVar[list[str]] = []

    def __init__(self, program: Any, device: torch.device, pool: Any):
        super().__init__(program, device, pool)
        self._name = getattr(program, "__name__", "")

    def replay(self) -> None:
        Counted.replays.append(self._name)
        super().replay()


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", Counted)  # type: ignore[arg-type]
    Counted.replays.clear()


def patched(name: str = "llama", recipe: Any = "exact") -> Any:
    return accelpatch.patch(CAUSAL[name].make(), recipe, verify=False)


def stock(model: nn.Module) -> Any:
    """A copy of the patched model that runs transformers' own loop."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def paths(model: Any) -> dict[str, int]:
    """What calls did; what a captured step ran is looked at in test_fused_layer.py, prompts in test_prefill.py."""
    every = model.accelpatch.report().paths.items()
    others = (FUSED, FUSED_PROMPT, MODULES, "prefill by modules: ")
    return {name: count for name, count in every if not name.startswith(others)}


def reasons(model: Any) -> list[str]:
    return [path for path in paths(model) if path.startswith("stock loop: ")]


def both(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    made = []
    for runner in (model, stock(model)):
        torch.manual_seed(5)
        made.append(runner.generate(**copy.deepcopy(inputs), **options))
    return made[0], made[1]


@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_of_every_family(name: str) -> None:
    model = patched(name)
    for batch in (full_batch(), padded_batch()):
        for way in ("greedy", "sampling"):
            mine, its = both(model, batch, max_new_tokens=24, **WAYS[way])
            assert torch.equal(mine, its), way
    assert paths(model) == {CAPTURED: 4 * 23}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_under_another_default_dtype(dtype: torch.dtype) -> None:
    model, before = patched(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        mine, its = both(model, full_batch(), max_new_tokens=8, do_sample=False)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(mine, its)
    assert list(paths(model)) == [CAPTURED]


@pytest.mark.each_value
@spread("way, batch, recipe", [*WAYS], {"one-length": full_batch, "left-padding": padded_batch}, ["int8", "int4"])
def test_the_tokens_of_the_stock_loop(way: str, batch: Any, recipe: str) -> None:
    model = patched("llama", recipe)
    for _ in range(2):  # the second call finds everything captured
        mine, its = both(model, batch(), max_new_tokens=24, **WAYS[way])
        assert torch.equal(mine, its)
    assert list(paths(model)) == [CAPTURED]
    assert paths(model)[CAPTURED] == 2 * (mine.shape[1] - batch()["input_ids"].shape[1] - 1)


@pytest.mark.parametrize("way", BY_HOST)
def test_the_host_chooses_where_it_must(way: str) -> None:
    model = patched()
    mine, its = both(model, padded_batch(), max_new_tokens=24, **BY_HOST[way])
    assert torch.equal(mine, its)
    assert paths(model)[CAPTURED] == 23
    assert any(path.startswith("token chosen by the host: ") for path in paths(model))
    assert reasons(model) == []


def test_processors_and_criteria_of_the_users_own() -> None:
    model, processor = patched(), Every()
    ends = AtLength([12, 18, 15])
    options = GREEDY | {"eos_token_id": 10**6, "pad_token_id": 1}
    mine, its = (
        one.generate(
            **full_batch(),
            **options,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        for one in (model, stock(model))
    )
    assert torch.equal(mine, its)
    assert mine.shape[1] == 18
    assert processor.seen == list(range(9, 18)) * 2
    assert paths(model)[CAPTURED] == 8


def test_another_temperature_captures_no_model_again() -> None:
    model, made = patched(), []
    for temperature in (0.7, 1.3, 0.7):
        mine, its = both(model, full_batch(), max_new_tokens=8, do_sample=True, temperature=temperature)
        assert torch.equal(mine, its)
        made.append(next(iter(vars(model)[RUNTIME].captured._steps.values())))
    assert made[0] is made[1] is made[2]


def test_a_step_too_many_runs_and_is_dropped() -> None:
    model, batch = patched(), {key: value[:1] for key, value in full_batch().items()}
    free = stock(model).generate(**batch, **GREEDY)
    end = int(free[0, 14])
    mine, its = both(model, batch, **GREEDY, eos_token_id=end, pad_token_id=0, return_dict_in_generate=True)
    assert torch.equal(mine.sequences, its.sequences)
    new = mine.sequences.shape[1] - 9
    assert 1 < new < 24
    assert Counted.replays.count("advance") == new  # new - 1 are needed
    assert paths(model)[CAPTURED] == new - 1
    assert_equal_caches(mine.past_key_values, its.past_key_values)


def assert_equal_caches(mine: Any, its: Any, mask: torch.Tensor | None = None) -> None:
    """What hidden tokens (where mask[B, prompt] is zero) leave in a cache is nobody's business."""
    assert type(mine) is type(its)
    assert mine.get_seq_length() == its.get_seq_length()
    for one, other in zip(mine.layers, its.layers, strict=True):
        for held, due in ((one.keys, other.keys), (one.values, other.values)):
            assert held.shape == due.shape
            shown = torch.ones(held.shape[0], mine.get_seq_length(), dtype=torch.bool)
            if mask is not None:
                shown[:, : mask.shape[1]] = mask.bool()
            shown = shown[:, -held.shape[2] :]
            torch.testing.assert_close(held.transpose(1, 2)[shown], due.transpose(1, 2)[shown], rtol=1e-4, atol=1e-5)
            assert bool(held.isfinite().all())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_neox"])
def test_the_cache_that_comes_back_goes_on(name: str) -> None:
    model, results = patched(name), []
    for runner in (model, stock(model)):
        first = runner.generate(**padded_batch(), **GREEDY, return_dict_in_generate=True)
        results.append(copy.deepcopy(first.past_key_values))
        ids = torch.cat([first.sequences, torch.tensor([[4, 5, 6]] * 3)], dim=1)
        mask = torch.cat([padded_batch()["attention_mask"], torch.ones(3, 27, dtype=torch.int64)], dim=1)
        results.append(runner.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY))
    assert_equal_caches(results[0], results[2], padded_batch()["attention_mask"])
    assert torch.equal(results[1], results[3])
    assert paths(model) == {CAPTURED: 46}


def test_a_cache_that_the_user_holds_is_filled() -> None:
    model, caches = patched("qwen3"), []
    for runner in (model, stock(model)):
        caches.append(DynamicCache(config=runner.config))
        runner.generate(**full_batch(), past_key_values=caches[-1], **GREEDY)
    assert_equal_caches(*caches)
    assert paths(model) == {CAPTURED: 23}


def test_a_cache_grows_by_doubling_and_the_largest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "SMALLEST", 4)
    made: list[int] = []
    before = CapturedModel._made
    monkeypatch.setattr(CapturedModel, "_made", lambda *given: made.append(given[3]) or before(*given))
    model = patched("gemma3")
    mine, its = both(model, padded_batch(), max_new_tokens=60, do_sample=False)
    assert torch.equal(mine, its)
    assert made == [16, 32, 64, 128]
    assert [capacity for _, capacity, *_ in vars(model)[RUNTIME].captured._steps] == made[-1:]
    assert paths(model) == {CAPTURED: 59}


@pytest.mark.parametrize("bad, needed, kept", [({}, 32, [128]), ({}, 16, [16, 128]), ({0: "bad"}, 32, [32, 128])])
def test_a_larger_cache_serves(bad: Any, needed: int, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    vars(model)[RUNTIME].unfuse(bad)  # their modules attend over all of a cache
    for smallest in (128, needed):
        monkeypatch.setattr(kv_cache, "SMALLEST", smallest)
        assert torch.equal(*both(model, padded_batch(), max_new_tokens=4, do_sample=False))
    assert sorted(capacity for _, capacity, *_ in vars(model)[RUNTIME].captured._steps) == kept


def test_few_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "STEPS", 2)
    model = patched()
    for rows in (1, 2, 3):
        mine, its = both(model, {key: value[:rows] for key, value in full_batch().items()}, **GREEDY)
        assert torch.equal(mine, its)
    assert [rows for rows, *_ in vars(model)[RUNTIME].captured._steps] == [2, 3]
    assert list(vars(model)[RUNTIME].captured._batches) == [2, 3]


def test_a_recipes_max_length_bounds_the_cache() -> None:
    text = "extends: exact\nruntime: {max_length: 20}"
    model = patched(recipe=parse(text))
    with pytest.raises(PatchError, match=r"up to 33 tokens .* max_length is 20"):
        model.generate(**full_batch(), **GREEDY)
    assert Counted.replays == []
    mine, its = both(model, full_batch(), max_new_tokens=11, do_sample=False)
    assert torch.equal(mine, its)
    assert [capacity for _, capacity, *_ in vars(model)[RUNTIME].captured._steps] == [64]


def test_a_streamer_gets_every_token() -> None:
    model, batch = patched(), {key: value[:1] for key, value in full_batch().items()}
    streamer = Calling()
    made = model.generate(**batch, **GREEDY, streamer=streamer)
    assert torch.equal(torch.cat(streamer.taken), made[0])
    assert [len(taken) for taken in streamer.taken] == [9] + [1] * 24
    assert streamer.ended
    assert paths(model) == {CAPTURED: 23}


def test_a_copy_of_the_model_captures_its_own() -> None:
    model = patched()
    model.generate(**full_batch(), **GREEDY)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(torch.linspace(-1, 1, other.lm_head.weight.shape[0])[:, None])
    due = stock(other).generate(**full_batch(), **GREEDY)
    assert torch.equal(other.generate(**full_batch(), **GREEDY), due)
    assert vars(other)[RUNTIME].paths[CAPTURED] == 23
    assert isinstance(vars(other)[RUNTIME], CapturedRuntime)


def test_inference_mode_and_no_grad_share_the_steps() -> None:
    model, batch = patched(), padded_batch()
    due = stock(model).generate(**batch, **GREEDY)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model.generate(**batch, **GREEDY), due)
        assert torch.equal(model.generate(**batch, **GREEDY), due)
    assert paths(model) == {CAPTURED: 92}
    assert len(Counted.replays) == 4 * (23 + 24)
