"""Drafts of an assistant over the native steps of a CPU: bit for bit what the model makes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

import accelpatch
from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.report import DRAFT_CHECKS as CHECKS
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.report import NO_DRAFTS as NONE
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.support.assisting import assistant, mixed, paced
from tests.support.drafting import assert_same, generate, repeating, row
from tests.support.spread import spread
from tests.support.streaming import AtLength, Calling, Every

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "at-least": {"min_new_tokens": 20, "eos_token_id": [5, 9, 10**6]},
    "sampling": {"do_sample": True, "temperature": 0.3, "top_k": 20},
    "repetition": {"repetition_penalty": 1.2},
    "scores": {"output_scores": True, "output_logits": True, "min_new_tokens": 12, "eos_token_id": list(range(50))},
}


def target(name: str = "llama", recipe: str = "int8") -> Any:
    return accelpatch.patch(repeating(name), recipe, verify=False)


def paths(model: Any) -> dict[str, int]:
    return dict(model.accelpatch.report().paths)


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@spread("name, recipe", ["llama", "qwen2", "qwen3", "gemma2"], ["int8", "int4", "exact"])
def test_the_bits_without_it_in_fewer_steps(
    name: str, recipe: str, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(name, recipe)
    if name == "gemma2" and not patched:
        pytest.skip("a sliding window needs the patch")
    for wrong, numbers in ((0.0, None), (0.1, mixed())):
        paced(monkeypatch, numbers)
        draft = assistant(name, wrong, patched=patched)
        for ids in (row(40, 7), row(1)):
            due = generate(model, ids, max_new_tokens=40)
            model.accelpatch.report().paths.clear()
            assert_same(generate(model, ids, max_new_tokens=40, assistant_model=draft), due)
            made = paths(model)
            assert not [path for path in made if path.startswith(NONE)], made
            assert made[NATIVE] + made[ACCEPTED] == 39
            assert 0 <= made[ACCEPTED] <= made[DRAFTED] <= 7 * made[CHECKS]
            if not wrong and recipe == "exact":
                assert made[ACCEPTED] == made[DRAFTED] > 30


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_choosing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    for wrong in (0.0, 0.1):
        paced(monkeypatch, mixed())
        draft = assistant(wrong=wrong)
        for ids in (row(40, 7), row(1)):
            due = generate(model, ids, **WAYS[way])
            assert_same(generate(model, ids, assistant_model=draft, **WAYS[way]), due)
    assert paths(model)[ACCEPTED] > 5


@pytest.mark.parametrize("place", [1, 2, 5, 6, 7])
def test_an_end_among_the_tokens_of_a_step(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = target(), assistant()
    paced(monkeypatch)
    end = int(generate(model, row()).sequences[0, 9 + place])
    due = generate(model, row(), eos_token_id=end)
    streamer = Calling()
    assert_same(generate(model, row(), streamer=streamer, assistant_model=draft, eos_token_id=end), due)
    assert torch.equal(torch.cat(streamer.taken), due.sequences[0])


def test_beyond_the_room_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.runtime.cpu.native_cache.ROOM", 3)
    paced(monkeypatch)
    model, draft = target(), assistant()
    due = generate(model, row(), max_new_tokens=60)
    assert_same(generate(model, row(), max_new_tokens=60, assistant_model=draft), due)


@pytest.mark.parametrize("form", ["int8", "fp8", "bf16"])
def test_a_cache_in_another_format(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens lie in the recipe's format, in a cache that has grown too."""
    monkeypatch.setattr("accelpatch.runtime.cpu.native_cache.ROOM", 3)
    paced(monkeypatch, mixed())
    model = accelpatch.patch(repeating("llama"), {"extends": "exact", "runtime": {"kv_cache": form}}, verify=False)
    due = generate(model, row(), max_new_tokens=60)
    for given in ({"assistant_model": assistant()}, {"assistant_model": model}, {"assistant_early_exit": 1}):
        made = generate(model, row(), max_new_tokens=60, **given)
        assert made.past_key_values.layers[0]._contents.static.form == form
        assert_same(made, due)


def test_processors_criteria_and_a_cache_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target("qwen2"), assistant("qwen2")
    results: list[Any] = []
    for given in ({}, {"assistant_model": draft}):
        options: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([Every()]),
            "stopping_criteria": StoppingCriteriaList([AtLength([25])]),
        }
        first = generate(model, row(), **options, **given)
        ids = torch.cat([first.sequences, torch.tensor([[4, 5, 6]])], dim=1)
        results.append(generate(model, ids, past_key_values=first.past_key_values, **given))
    assert_same(*results)
    assert paths(model)[ACCEPTED] > 20


def test_an_early_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("qwen3")
    model.generation_config.assistant_confidence_threshold = 0.0
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        for options in ({}, {"repetition_penalty": 1.2}):
            due = generate(model, row(), **options)
            assert_same(generate(model, row(), assistant_early_exit=1, **options), due)
    assert paths(model)[ACCEPTED] > 0
    assert not [path for path in paths(model) if path.startswith(NONE)]


def test_left_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch)
    model, draft = target("mistral"), assistant("mistral")
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.int64), row()], dim=1)
    options: dict[str, Any] = {"attention_mask": ids.ne(0).long(), "max_new_tokens": 30, "do_sample": False}
    due = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=draft, **options), due)
    assert paths(model)[ACCEPTED] > 20


def test_what_native_steps_cannot_do() -> None:
    model, draft = target(), assistant()
    due = generate(model, row())
    handle = draft.register_forward_hook(lambda *_: None)
    assert torch.equal(generate(model, row(), assistant_model=draft).sequences, due.sequences)
    handle.remove()
    assert [path for path in paths(model) if path.startswith(NONE)]
