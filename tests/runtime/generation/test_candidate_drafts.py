"""prompt_lookup_num_tokens= and assistants of another tokenizer over captured and native steps: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.report import DRAFT_CHECKS as CHECKS
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.report import NO_DRAFTS as NONE
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.assisting import assistant, mixed, paced, target
from tests.support.drafting import as_on_a_gpu, assert_same, generate, row
from tests.support.tiny import CAUSAL
from tests.support.word_tokenizer import of_characters, of_words

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.3, "top_k": 20},
    "repetition": {"repetition_penalty": 1.2},
    "scores": {"output_scores": True, "output_logits": True, "min_new_tokens": 12, "eos_token_id": list(range(50))},
}


@pytest.fixture(params=["native", "captured"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What steps are called in a report."""
    if request.param == "captured":
        as_on_a_gpu(monkeypatch)
    return CAPTURED if request.param == "captured" else NATIVE


def counts(model: Any) -> dict[str, int]:
    return dict(model.accelpatch.report().paths)


def said(model: Any) -> Tensor:
    """A text of the model's own, which runs in circles."""
    made: Tensor = generate(model, row(), max_new_tokens=40).sequences
    return made


def larger(patched: bool, more: int = 8) -> Any:
    """An assistant with the target's weights, and some tokens more, which it never writes."""
    draft = assistant(patched=False)
    draft.resize_token_embeddings(draft.config.vocab_size + more, mean_resizing=False)
    with torch.no_grad():
        draft.get_output_embeddings().weight[-more:] = 0
    return accelpatch.patch(draft, "exact", verify=False) if patched else draft


@pytest.mark.parametrize("way", WAYS)
def test_prompt_lookup(way: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        for ids in (said(model), row(2)):
            due = generate(model, ids, max_new_tokens=30, **WAYS[way])
            before = counts(model)
            given = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}
            assert_same(generate(model, ids, max_new_tokens=30, **given, **WAYS[way]), due)
            made = {path: count - before.get(path, 0) for path, count in counts(model).items()}
            assert made[steps] + made.get(ACCEPTED, 0) == due.sequences.shape[1] - ids.shape[1] - 1
            assert made.get(DRAFTED, 0) <= 5 * made.get(CHECKS, 0)
    assert counts(model)[ACCEPTED] > (8 if way in ("greedy", "sampling") else 0), counts(model)
    assert not [path for path in counts(model) if path.startswith((NONE, "stock loop"))]


def test_candidates_are_no_text_of_a_processor(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps a cache of its own, of the tokens that it was called with."""
    paced(monkeypatch)
    model = target()
    due = generate(model, row(12), max_new_tokens=30, guidance_scale=1.5)
    assert_same(generate(model, row(12), max_new_tokens=30, guidance_scale=1.5, prompt_lookup_num_tokens=4), due)
    assert counts(model)[DRAFTED] > 3


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_prompt_lookup_over_a_cache_in_8_bits(form: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model = target(more=f", kv_cache: {form}")
    ids = said(model)
    due = generate(model, ids)
    assert_same(generate(model, ids, prompt_lookup_num_tokens=4), due)
    assert counts(model)[ACCEPTED] > 3
    assert not [path for path in counts(model) if path.startswith((NONE, "stock loop"))]


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_an_assistant_of_another_tokenizer(patched: bool, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = target(), larger(patched)
    both = {"assistant_model": draft, "tokenizer": of_words(), "assistant_tokenizer": of_characters()}
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        for ids in (row(), row(2)):
            for way in ("greedy", "repetition", "scores"):
                due = generate(model, ids, max_new_tokens=30, **WAYS[way])
                assert_same(generate(model, ids, max_new_tokens=30, **both, **WAYS[way]), due)
    made = counts(model)
    assert made[DRAFTED] >= made[CHECKS] > 10
    assert not [path for path in made if path.startswith((NONE, "stock loop"))], made


def test_drafts_of_another_tokenizer_that_are_right(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokenizer twice, which transformers takes for two: the assistant is right."""
    paced(monkeypatch)
    model, draft = target(), larger(True)
    both = {"assistant_model": draft, "tokenizer": of_words(), "assistant_tokenizer": of_words()}
    due = generate(model, row(), max_new_tokens=30)
    assert_same(generate(model, row(), max_new_tokens=30, **both), due)
    made = counts(model)
    assert made[ACCEPTED] > 10, made


def test_what_runs_transformers_own_loop(steps: str) -> None:
    model, draft = target(), larger(False)
    both = {"assistant_model": draft, "tokenizer": of_words(), "assistant_tokenizer": of_characters()}
    generate(model, row(), do_sample=True, **both)
    reasons = [path.removeprefix(NONE) for path in counts(model) if path.startswith(NONE)]
    assert reasons == ["another tokenizer, whose sampled tokens are another's"]
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, row().repeat(2, 1), prompt_lookup_num_tokens=3)


def test_modules_in_the_target_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = accelpatch.patch(CAUSAL["opt"].make(), "exact", verify=False)
    due = generate(model, row())
    made = generate(model, row(), prompt_lookup_num_tokens=3, eos_token_id=10**6)
    assert torch.equal(made.sequences, due.sequences)
    assert f"{NONE}modules in the captured step" in counts(model)
