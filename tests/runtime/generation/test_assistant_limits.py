"""Drafts of an assistant: families, bad input, what captured steps cannot do, and what sampled tokens are like."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import accelpatch
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.report import NO_DRAFTS as NONE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import model_drafts
from tests.support.assisting import assistant, mixed, paced, target
from tests.support.drafting import as_on_a_gpu, assert_same, generate, paths, row
from tests.support.tiny import CAUSAL


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere2", "gpt2", "opt", "granite"])
def test_other_families(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, mixed())
    model = accelpatch.patch(CAUSAL[name].make(), "exact", verify=False)
    draft = CAUSAL[name].make()
    draft.generation_config.assistant_confidence_threshold = 0.0
    due = generate(model, row())
    # tokens alone: on a CPU torch's own products stand for those of some of these layers
    assert torch.equal(generate(model, row(), assistant_model=draft).sequences, due.sequences)
    if name == "opt":  # with a projection around its decoder, no layer is fused
        assert f"{NONE}modules in the captured step" in paths(model)
    else:
        assert paths(model)[ACCEPTED] > 10, paths(model)


def test_an_assistant_whose_window_is_shorter_than_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target("llama"), assistant("mistral")  # it sees 5 tokens
    for ids in (row(30, 4), row(2)):
        assert_same(generate(model, ids, assistant_model=draft), generate(model, ids))
    assert paths(model)[DRAFTED] > 10


def test_an_assistant_of_another_vocabulary() -> None:
    model, draft = target(), CAUSAL["llama"].make(vocab_size=150)
    with pytest.raises(ValueError, match="different tokenizers"):
        generate(model, row(), assistant_model=draft)


def test_stop_strings(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model, draft = target(), assistant()
    free = generate(model, row()).sequences
    words = [tokenizer.decode(token) for token in free[0, 9:]]
    said = [word for word in dict.fromkeys(words[1:12]) if word.isascii() and word.isprintable()]
    for word in said[:3]:
        options = {"stop_strings": [word], "tokenizer": tokenizer}
        due = generate(model, row(), **options)
        assert due.sequences.shape[1] < free.shape[1], words
        assert_same(generate(model, row(), assistant_model=draft, **options), due)
    assert paths(model)[ACCEPTED] > 0


def test_what_captured_steps_cannot_do() -> None:
    model, draft = target(), assistant()
    due = generate(model, row())
    handle = draft.register_forward_hook(lambda *_: None)
    for given in ({"assistant_model": draft}, {"assistant_model": model}):
        assert torch.equal(generate(model, row(), **given).sequences, due.sequences)
    handle.remove()
    with pytest.raises(ValueError, match="num_mtp_layers"):
        generate(model, row(), use_mtp=True)
    reasons = {path.removeprefix(NONE) for path in paths(model) if path.startswith(NONE)}
    assert reasons == {"a hook on the assistant", "the assistant is within another call"}
    assert DRAFTED not in paths(model)
    ids = row(12, 3).repeat(1, 4)
    due = generate(model, ids)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3).sequences, due.sequences)


def test_an_assistant_that_is_unpatched_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target(), assistant()
    due = generate(model, row())
    for _ in range(2):
        assert_same(generate(model, row(), assistant_model=draft), due)
    draft.accelpatch.unpatch()
    assert_same(generate(model, row(), assistant_model=draft), due)
    with torch.no_grad():
        draft.model.layers[0].mlp.up_proj.weight.mul_(-1)  # it has changed
    assert_same(generate(model, row(), assistant_model=draft), due)


def test_what_is_kept_of_assistants_and_samplers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps hold an unpatched assistant's weights, and each way of sampling has programs of its own."""
    paced(monkeypatch)
    monkeypatch.setattr(model_drafts, "SAMPLERS", 1)
    model, due, gone = target(), generate(target(), row()), []
    for _ in range(4):
        draft = assistant(patched=False)
        gone.append(weakref.ref(draft))
        assert_same(generate(model, row(), assistant_model=draft), due)
    del draft
    gc.collect()
    assert [one() is None for one in gone] == [True, True, False, False]
    draft = assistant()
    for share in range(8):
        generate(model, row(), assistant_model=draft, do_sample=True, temperature=0.5 + share / 10)
    (batch,) = {step.batch for step in vars(model)[RUNTIME].captured._steps.values()}
    assert len(batch.model_drafts._accepting) == len(model_drafts.SIZES)
    assert_same(generate(model, row(), assistant_model=draft), due)


def chi_square(found: Tensor, due: Tensor) -> float:
    """The statistic of counts found[N] beside due[N]."""
    return float(((found - due) ** 2 / due).sum())


@pytest.mark.parametrize("wrong", [0.0, 0.15])
def test_sampled_tokens_have_the_targets_distribution(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of tokens, each from one of four: the second may be an accepted draft token, or one in place of it."""
    paced(monkeypatch, iter(lambda: 2, None))
    model, draft = target(), assistant(wrong=wrong, number=2)
    options: dict[str, Any] = {"do_sample": True, "top_k": 4, "temperature": 2.0, "max_new_tokens": 3}
    calls, pairs = 400, {}
    for seed in range(calls):
        made = generate(model, row(), seed=seed, assistant_model=draft, **options).sequences[0, 9:]
        pairs[tuple(made.tolist())] = pairs.get(tuple(made.tolist()), 0) + 1
    chances = {}

    def walk(ids: Tensor, chance: float) -> None:
        if ids.shape[1] == 12:
            chances[tuple(ids[0, 9:].tolist())] = chance
            return
        scores = model(ids).logits[0, -1].float() / 2.0
        best = scores.topk(4)
        for token, share in zip(best.indices, best.values.softmax(0), strict=True):
            walk(torch.cat([ids, token.view(1, 1)], dim=1), chance * float(share))

    with torch.no_grad():
        walk(row(), 1.0)
    assert set(pairs) <= set(chances)
    due = torch.tensor([chance * calls for chance in chances.values()])
    found = torch.tensor([float(pairs.get(pair, 0)) for pair in chances])
    rare = due < 5
    if rare.any():
        due = torch.cat([due[~rare], due[rare].sum()[None]])
        found = torch.cat([found[~rare], found[rare].sum()[None]])
    freedom = len(due) - 1
    assert chi_square(found, due) < freedom + 4 * (2 * freedom) ** 0.5
    assert paths(model)[ACCEPTED] > calls / 4
