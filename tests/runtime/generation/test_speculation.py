"""Prompt lookup behind stock generate(): bit for bit what the same model makes without it, in fewer steps."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from accelpatch.fusion.fused_model import FUSED
from accelpatch.runtime.generation.speculation import ACCEPTED, STEPS
from accelpatch.runtime.graphs import kv_cache
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.drafting import (
    RULES,
    anywhere,
    as_on_a_gpu,
    assert_same,
    generate,
    oracle,
    pair,
    paths,
    row,
    stock,
)  # fmt: skip
from tests.support.spread import spread
from tests.support.streaming import AtLength, Calling, Every

DEVICE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "at-least": {"min_new_tokens": 20, "eos_token_id": [5, 9, 10**6]},
    "min-length": {"min_length": 22, "eos_token_id": list(range(60))},
    "sampling": {"do_sample": True, "temperature": 0.2, "top_k": 20, "top_p": 0.9},
    "min-p": {"do_sample": True, "temperature": 0.3, "min_p": 0.05, "top_k": 0},
    "sampling-at-least": {"do_sample": True, "top_k": 3, "min_new_tokens": 15, "eos_token_id": list(range(60))},
}
BY_HOST: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.2},
    "sampling-no-repeats": {"do_sample": True, "no_repeat_ngram_size": 4, "top_k": 3},
    "time": {"max_time": 600.0},
    "scores": {"output_scores": True, "output_logits": True, "min_new_tokens": 12, "eos_token_id": list(range(50))},
    "sampled-scores": {"do_sample": True, "top_k": 2, "output_scores": True, "output_logits": True},
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def prompts(plain: Any) -> dict[str, Tensor]:
    """Something new, something repeated, the model's own answer twice, and one token."""
    own = generate(plain, row(), max_new_tokens=30).sequences
    return {
        "new": row(40, 7),
        "repeated": row(12, 3).repeat(1, 4),
        "own answer": torch.cat([own, own[:, :20]], dim=1),
        "one token": row(1),
    }


@spread("name, rules", ["llama", "mistral", "qwen2", "qwen3"], [*RULES])
def test_the_bits_without_it_in_fewer_steps(name: str, rules: str) -> None:
    drafting, plain = pair(name, rules)
    for ids in prompts(plain).values():
        before = paths(drafting)
        assert_same(generate(drafting, ids, max_new_tokens=40), generate(plain, ids, max_new_tokens=40))
        made = {path: count - before.get(path, 0) for path, count in paths(drafting).items()}
        assert made[CAPTURED] + made[ACCEPTED] == 39
        assert made[CAPTURED] == made[FUSED]
        assert 0 <= made[ACCEPTED] <= 7 * made[STEPS]
    counts = paths(drafting)
    assert counts[ACCEPTED] > 30, counts
    assert set(counts) == {CAPTURED, FUSED, STEPS, ACCEPTED}


@pytest.mark.parametrize("way", DEVICE | BY_HOST)
def test_every_way_of_choosing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = pair()
    options = (DEVICE | BY_HOST)[way]
    for ids in (*prompts(plain).values(), None):
        if ids is None:  # drafts of all kinds
            ids = row()
            answer = generate(plain, ids, **options).sequences
            oracle(monkeypatch, answer, anywhere(3))
        due = generate(plain, ids, **options)
        assert_same(generate(drafting, ids, **options), due)
        assert torch.equal(due.sequences, generate(stock(plain), ids, **options).sequences)
    by_host = [path for path in paths(drafting) if path.startswith("token chosen by the host: ")]
    assert bool(by_host) == (way in BY_HOST)
    assert paths(drafting)[ACCEPTED] > 10


@pytest.mark.parametrize("right", [*range(8), "mixed"])
def test_drafts_wrong_from_each_place_on(right: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = pair("mistral")
    due = generate(plain, row(), max_new_tokens=50)
    oracle(monkeypatch, due.sequences, anywhere(1) if right == "mixed" else itertools.repeat(right))
    assert_same(generate(drafting, row(), max_new_tokens=50), due)
    if right != "mixed":
        # the prompt gives one token, each step one more and the right drafts
        steps = -(-49 // (right + 1))
        counts = paths(drafting)
        assert (counts[CAPTURED], counts[ACCEPTED]) == (steps, 49 - steps)


@pytest.mark.each_value
@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_end_among_the_tokens_of_a_step(place: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = ENDED.setdefault(0, pair())
    options = {"do_sample": sampled, "top_k": 5}
    free = generate(plain, row(), **options).sequences
    options["eos_token_id"] = int(free[0, 9 + place])
    due = generate(plain, row(), **options)
    oracle(monkeypatch, free, itertools.repeat(7))
    streamer = Calling()
    assert_same(generate(drafting, row(), streamer=streamer, **options), due)
    assert torch.equal(torch.cat(streamer.taken), due.sequences[0])
    assert streamer.ended


ENDED: dict[int, Any] = {}


@pytest.mark.parametrize("new", range(1, 13))
def test_max_length_at_each_place(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = ENDED.setdefault(0, pair())
    oracle(monkeypatch, generate(plain, row()).sequences, itertools.repeat(7))
    for options in ({}, {"repetition_penalty": 1.0001}, {"do_sample": True, "temperature": 1e-3}):
        due = generate(plain, row(), max_new_tokens=new, **options)
        assert_same(generate(drafting, row(), max_new_tokens=new, **options), due)


@spread("way, limit", ["greedy", "sampling", "repetition"], {"growing": "", "to-its-end": ", max_length: 64"})
def test_the_end_of_the_cache(limit: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "SMALLEST", 4)
    drafting, plain = pair("qwen3", more=limit)
    for length in (1, 2, 5, 8):
        options = (DEVICE | BY_HOST)[way] | {"max_new_tokens": 64 - length}
        due = generate(plain, row(length), **options)
        with monkeypatch.context() as context:
            oracle(context, due.sequences, anywhere(length))
            assert_same(generate(drafting, row(length), **options), due)
    assert paths(drafting)[ACCEPTED] > 90


def test_processors_and_criteria_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = pair()
    results, seen = [], []
    for model in (plain, drafting):
        processor = Every()
        results.append(
            generate(
                model, row(), logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([AtLength([25])]),
            )
        )  # fmt: skip
        seen.append(processor.seen)
        oracle(monkeypatch, results[0].sequences, anywhere(2))
    assert_same(*results)
    assert seen == [list(range(9, 25))] * 2
    assert paths(drafting)[ACCEPTED] > 0


def test_the_cache_that_comes_back_goes_on() -> None:
    results = []
    for model in pair("qwen2"):
        first = generate(model, row().repeat(1, 3))
        results.append(copy.deepcopy(first))
        ids = torch.cat([first.sequences, torch.tensor([[4, 5, 6]])], dim=1)
        results.append(generate(model, ids, past_key_values=first.past_key_values))
    assert_same(results[0], results[2])
    assert_same(results[1], results[3])


def test_left_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    results, ids = [], torch.cat([torch.zeros(1, 5, dtype=torch.int64), row()], dim=1)
    mask = ids.ne(0).long()
    for model in reversed(pair("mistral")):
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False))
        oracle(monkeypatch, results[0], anywhere(4))
    assert torch.equal(*results)
