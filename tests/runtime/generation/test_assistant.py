"""Drafts of an assistant behind stock generate(): bit for bit what the model makes without them, in fewer steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from accelpatch.fusion.fused_model import FUSED
from accelpatch.report import DRAFT_CHECKS as CHECKS
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.report import NO_DRAFTS as NONE
from accelpatch.runtime.generation import drafter
from accelpatch.runtime.graphs import kv_cache
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.assisting import assistant, mixed, paced, target
from tests.support.drafting import RULES, as_on_a_gpu, assert_same, generate, paths, row, stock
from tests.support.spread import spread
from tests.support.streaming import AtLength, Calling, Every

GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "at-least": {"min_new_tokens": 20, "eos_token_id": [5, 9, 10**6]},
    "min-length": {"min_length": 22, "eos_token_id": list(range(60))},
}
BY_HOST: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.2},
    "sampling-no-repeats": {"do_sample": True, "no_repeat_ngram_size": 4, "top_k": 3},
    "time": {"max_time": 600.0},
    "scores": {"output_scores": True, "output_logits": True, "min_new_tokens": 12, "eos_token_id": list(range(50))},
    "sampled-scores": {"do_sample": True, "top_k": 2, "output_scores": True, "output_logits": True},
}
COUNTED = {CAPTURED, FUSED, CHECKS, DRAFTED, ACCEPTED}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def counts(model: Any) -> dict[str, int]:
    """What steps ran, without times."""
    return {path: count for path, count in paths(model).items() if path != drafter.SAVED}


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@spread("name, rules", ["llama", "mistral", "qwen2", "qwen3"], [*RULES])
def test_the_bits_without_it_in_fewer_steps(
    name: str, rules: str, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(name, rules)
    for wrong, numbers in ((0.0, None), (0.3, None), (0.1, mixed())):
        paced(monkeypatch, numbers)
        draft = assistant(name, wrong, patched=patched)
        for ids in (row(40, 7), row(1)):
            due = generate(model, ids, max_new_tokens=40)
            before = counts(model)
            assert_same(generate(model, ids, max_new_tokens=40, assistant_model=draft), due)
            made = {path: count - before.get(path, 0) for path, count in counts(model).items()}
            assert made[CAPTURED] + made[ACCEPTED] == 39
            assert made[CAPTURED] == made[FUSED]
            assert 0 <= made[ACCEPTED] <= made[DRAFTED] <= 7 * made[CHECKS]
            if not wrong and rules == "exact":
                assert made[ACCEPTED] == made[DRAFTED] == 32
    assert set(counts(model)) <= COUNTED


@pytest.mark.parametrize("way", GREEDY | BY_HOST)
def test_every_way_of_choosing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = target(), (GREEDY | BY_HOST)[way]
    for wrong in (0.0, 0.1):
        draft = assistant(wrong=wrong)
        for ids in (row(40, 7), row(12, 3).repeat(1, 4), row(1)):
            paced(monkeypatch, mixed())
            due = generate(model, ids, **options)
            assert_same(generate(model, ids, assistant_model=draft, **options), due)
    by_host = [path for path in paths(model) if path.startswith("token chosen by the host: ")]
    assert bool(by_host) == (way in BY_HOST)
    assert paths(model)[ACCEPTED] > 5


@pytest.mark.parametrize("way", ["greedy", "sampling", "repetition"])
def test_transformers_own_tokens(way: str) -> None:
    model, draft = target("qwen3"), assistant("qwen3", 0.1)
    options = {"greedy": {}, "sampling": {"do_sample": True, "top_k": 1}, "repetition": {"repetition_penalty": 1.2}}[
        way
    ]
    due = generate(stock(model), row(), assistant_model=stock(draft), **options)
    assert torch.equal(generate(model, row(), assistant_model=draft, **options).sequences, due.sequences)


@pytest.mark.each_value
@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_end_among_the_tokens_of_a_step(place: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = ENDED.setdefault(0, (target(), assistant()))
    paced(monkeypatch)
    options: dict[str, Any] = {"do_sample": sampled, **({"top_k": 1} if sampled else {})}
    free = generate(model, row(), **options).sequences
    options["eos_token_id"] = int(free[0, 9 + place])
    due = generate(model, row(), **options)
    streamer = Calling()
    assert_same(generate(model, row(), streamer=streamer, assistant_model=draft, **options), due)
    assert torch.equal(torch.cat(streamer.taken), due.sequences[0])
    assert streamer.ended


ENDED: dict[int, Any] = {}


@pytest.mark.parametrize("new", range(1, 13))
def test_max_length_at_each_place(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = ENDED.setdefault(0, (target(), assistant()))
    paced(monkeypatch)
    for options in ({}, {"repetition_penalty": 1.0001}, {"do_sample": True, "top_k": 1}):
        due = generate(model, row(), max_new_tokens=new, **options)
        assert_same(generate(model, row(), max_new_tokens=new, assistant_model=draft, **options), due)


@spread("way, limit", ["greedy", "repetition"], {"growing": "", "to-its-end": ", max_length: 64"})
def test_the_end_of_the_cache(limit: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "SMALLEST", 4)
    (model, plain), draft = (target("qwen3", more=limit) for _ in range(2)), assistant("qwen3")
    for length in (1, 2, 5, 8):
        paced(monkeypatch, mixed())
        options = (GREEDY | BY_HOST)[way] | {"max_new_tokens": 64 - length}
        due = generate(plain, row(length), **options)
        assert_same(generate(model, row(length), assistant_model=draft, **options), due)
    assert paths(model)[ACCEPTED] > 20


def test_processors_and_criteria_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target(), assistant()
    results, seen = [], []
    for given in ({}, {"assistant_model": draft}):
        processor = Every()
        results.append(
            generate(
                model, row(), logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([AtLength([25])]), **given,
            )
        )  # fmt: skip
        seen.append(processor.seen)
    assert_same(*results)
    assert seen == [list(range(9, 25))] * 2
    assert paths(model)[ACCEPTED] > 0


def test_the_cache_that_comes_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    results, model, draft = [], target("qwen2"), assistant("qwen2")
    for given in ({}, {"assistant_model": draft}):
        first = generate(model, row(), **given)
        results.append(copy.deepcopy(first))
        ids = torch.cat([first.sequences, torch.tensor([[4, 5, 6]])], dim=1)
        results.append(generate(model, ids, past_key_values=first.past_key_values, **given))
    assert_same(results[0], results[2])
    assert_same(results[1], results[3])
    assert paths(model)[ACCEPTED] > 20


def test_left_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target("mistral"), assistant("mistral")
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.int64), row()], dim=1)
    options: dict[str, Any] = {"attention_mask": ids.ne(0).long(), "max_new_tokens": 40, "do_sample": False}
    due = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=draft, **options), due)
    assert paths(model)[ACCEPTED] == paths(model)[DRAFTED] > 30


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_early_exit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target(name)
    model.generation_config.assistant_confidence_threshold = 0.0
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        for options in ({}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 1}):
            for ids in (row(), row(1)):
                due = generate(model, ids, **options)
                assert_same(generate(model, ids, assistant_early_exit=1, **options), due)
    assert paths(model)[ACCEPTED] > 5
    assert not [path for path in paths(model) if path.startswith(NONE)]
    generate(model, row(), assistant_early_exit=3)
    assert [path for path in paths(model) if path.startswith(NONE)]


def test_drafting_stops_at_an_unlikely_token(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model = target()
    due = generate(model, row())
    for threshold in (0.9, 2.0):
        before = counts(model)
        draft = assistant(number=7, assistant_confidence_threshold=threshold)
        assert_same(generate(model, row(), assistant_model=draft), due)
    made = {path: count - before.get(path, 0) for path, count in counts(model).items()}
    assert made[DRAFTED] == made[CHECKS]  # one after another: none is that likely


def test_the_schedule_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target(), assistant(number=1, num_assistant_tokens_schedule="heuristic")
    generate(model, row(), assistant_model=draft)
    assert draft.generation_config.num_assistant_tokens > 5
