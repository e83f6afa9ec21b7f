"""Where prompt lookup ends: what runs without it and why, failures, streamers, copies, and what a report says."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import accelpatch
from accelpatch.errors import KernelError
from accelpatch.fusion.fused_model import FUSED, FusedModel
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.speculation import ACCEPTED, NONE, STEPS
from accelpatch.runtime.graphs import model_graphs
from accelpatch.runtime.graphs.model_graphs import MODULES
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.drafting import anywhere, as_on_a_gpu, assert_same, generate, oracle, pair, paths, row
from tests.support.streaming import Calling
from tests.support.tiny import CAUSAL

TEXT = "extends: exact\nruntime: {speculate: prompt_lookup}"


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def test_several_rows_run_without_it() -> None:
    drafting, plain = pair()
    assert_same(generate(drafting, row().repeat(3, 1)), generate(plain, row().repeat(3, 1)))
    assert paths(drafting) == {NONE + "3 rows": 1, CAPTURED: 23, FUSED: 23}


def test_layers_that_are_not_fused_run_without_it() -> None:
    model = accelpatch.patch(CAUSAL["bloom"].make(), parse(TEXT), verify=False)
    plain = accelpatch.patch(CAUSAL["bloom"].make(), "exact", verify=False)
    assert_same(generate(model, row().repeat(1, 4)), generate(plain, row().repeat(1, 4)))
    reason = "its scores get a bias by distance (ALiBi), which the attention kernels do not add"
    assert paths(model) == {NONE + "modules in the captured step": 1, CAPTURED: 23, MODULES + reason: 23}


def test_a_step_that_cannot_be_captured_leaves_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FusedModel.__call__

    def single(self: Any, tokens: Tensor, *given: Any) -> Tensor:
        if tokens.dim() == 2:
            raise KernelError("one token at a time")
        return whole(self, tokens, *given)

    monkeypatch.setattr(FusedModel, "__call__", single)
    drafting, plain = pair()
    assert_same(generate(drafting, row().repeat(1, 4)), generate(plain, row().repeat(1, 4)))
    assert paths(drafting) == {NONE + "KernelError: one token at a time": 1, CAPTURED: 23, FUSED: 23}


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.01}, {"do_sample": True}], ids=str)
def test_an_exception_in_a_streamer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the reader is gone")

    drafting, plain = pair()
    due = generate(plain, row(), **options)
    oracle(monkeypatch, due.sequences, itertools.repeat(7))
    with pytest.raises(RuntimeError, match="the reader is gone"):
        generate(drafting, row(), streamer=Calling(fail), **options)
    assert all(count >= 0 for count in paths(drafting).values())
    assert_same(generate(drafting, row(), **options), due)
    assert_same(generate(drafting, row(), **options), due)


def test_generate_from_within_a_streamer(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = pair()
    due, other = generate(plain, row()), generate(plain, row(5, 8))
    inner: list[Any] = []
    streamer = Calling(lambda: inner.append(generate(drafting, row(5, 8))))
    oracle(monkeypatch, due.sequences, itertools.repeat(7))
    assert_same(generate(drafting, row(), streamer=streamer), due)
    assert torch.equal(inner[0].sequences, other.sequences)
    assert paths(drafting)["stock loop: generate() within generate()"] == 1


def test_a_streamer_gets_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = pair()
    due = generate(plain, row())
    oracle(monkeypatch, due.sequences, anywhere(6))
    streamer = Calling()
    generate(drafting, row(), streamer=streamer)
    assert [taken.tolist() for taken in streamer.taken[1:]] == due.sequences[0, 9:, None].tolist()
    assert streamer.ended


def test_calls_of_one_and_of_many_rows_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "STEPS", 1)  # each call drops the other's step, batch and drafts
    drafting, plain = pair()
    for rows in (1, 2, 1, 1, 3, 1):
        ids = row().repeat(rows, 4)
        assert_same(generate(drafting, ids), generate(plain, ids))
    assert paths(drafting)[ACCEPTED] > 0


def test_a_copy_drafts_too() -> None:
    drafting, plain = pair("qwen2")
    generate(drafting, row())
    other = copy.deepcopy(drafting)
    before = paths(drafting)
    assert_same(generate(other, row().repeat(1, 4)), generate(plain, row().repeat(1, 4)))
    assert paths(drafting) == before
    assert vars(other)["_accelpatch_runtime"].paths[STEPS] > 0


def test_off_is_the_default_and_a_plan_says_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    generate(model, row().repeat(1, 4))
    assert paths(model) == {CAPTURED: 23, FUSED: 23}
    notes = accelpatch.plan(CAUSAL["llama"].make(), parse(TEXT)).report().notes
    assert "runtime.speculate is set and has no effect here" in notes


def test_stop_strings(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    drafting, plain = pair()
    free = generate(plain, row()).sequences
    oracle(monkeypatch, free, itertools.repeat(7))
    words = [tokenizer.decode(token) for token in free[0, 9:]]
    said = [word for word in dict.fromkeys(words[1:12]) if word.isascii() and word.isprintable()]
    assert len(said) > 2, words
    for word in said:
        options = {"stop_strings": [word], "tokenizer": tokenizer}
        due = generate(plain, row(), **options)
        assert due.sequences.shape[1] < free.shape[1], words
        assert_same(generate(drafting, row(), **options), due)
    counts = paths(drafting)
    assert counts["token chosen by the host: StopStringCriteria"] == len(said)
    assert counts[ACCEPTED] > 0
