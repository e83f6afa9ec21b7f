"""generate()'s own loop over native steps: everything that can happen between two of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.runtime.cpu import native_cache
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.runtime.cpu.test_native_step import by_modules, native_steps, patched
from tests.support.streaming import AtLength, Calling, Every
from tests.support.tiny import full_batch, padded_batch

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def both(make: Any, batch: dict[str, Tensor], name: str = "llama") -> tuple[Any, Any, Any]:
    """What the patched model and the same model without native steps give for the options that `make` makes."""
    model = patched(name)
    plain = by_modules(copy.deepcopy(model))
    return model, model.generate(**batch, **make()), plain.generate(**batch, **make())


def test_the_loop_runs_and_not_the_stock_one() -> None:
    model = patched("llama")
    model.generate(**padded_batch(), **GREEDY)
    paths = model.accelpatch.report().paths
    assert paths[NATIVE] == 23
    assert not any(path.startswith("stock loop") for path in paths)


def test_a_processor_of_the_users_own_sees_every_token() -> None:
    processor = Every()
    model, mine, its = both(lambda: GREEDY | {"logits_processor": LogitsProcessorList([processor])}, padded_batch())
    length = padded_batch()["input_ids"].shape[1]
    assert torch.equal(mine, its)
    assert processor.seen == list(range(length, length + 24)) * 2
    assert native_steps(model) == 23


def test_rows_that_end_at_different_lengths() -> None:
    batch = full_batch()
    batch = {key: value[:1].repeat(3, 1) for key, value in batch.items()}
    length = batch["input_ids"].shape[1]
    ends = [length + 3, length + 9, length + 6]
    criteria = StoppingCriteriaList([AtLength(ends)])
    options = GREEDY | {"stopping_criteria": criteria, "eos_token_id": 10**6, "pad_token_id": 1}
    _, mine, its = both(lambda: options, batch)
    assert torch.equal(mine, its)
    assert mine.shape[1] == length + 9
    assert bool((mine[0, length + 3 :] == 1).all())


def test_a_tokenizer_for_stop_strings_does_not_keep_steps_from_being_native() -> None:
    # generate() hands the tokenizer on to every call of the model
    model, mine, its = both(lambda: GREEDY | {"tokenizer": object()}, full_batch())
    assert torch.equal(mine, its)
    assert native_steps(model) == 23


def test_a_streamer_gets_the_prompt_and_each_token() -> None:
    batch = {key: value[:1] for key, value in full_batch().items()}
    streamer = Calling()
    made = patched("llama").generate(**batch, **GREEDY, streamer=streamer)
    assert torch.equal(torch.cat(streamer.taken), made[0])
    assert streamer.ended


def test_a_hook_set_between_two_tokens_is_served_from_the_next_on() -> None:
    model, calls = patched("llama"), []
    batch = {key: value[:1] for key, value in full_batch().items()}
    due = by_modules(copy.deepcopy(model)).generate(**batch, **GREEDY)

    def watch() -> None:
        model.model.layers[0].mlp.register_forward_hook(lambda *given: calls.append(1))

    made = model.generate(**batch, **GREEDY, streamer=Calling(watch))
    assert torch.equal(made, due)
    assert len(calls) == 22
    assert native_steps(model) == 1
    assert model.accelpatch.report().paths[f"{NATIVE}, but modules in layers [0]: a hook inside"] == 22


def test_a_weight_changed_between_two_tokens_is_used_from_the_next_on() -> None:
    model = patched("llama")
    batch = {key: value[:1] for key, value in full_batch().items()}

    def results(runner: Any) -> Tensor:
        def change() -> None:
            runner.model.norm.weight = torch.nn.Parameter(torch.linspace(-2, 2, runner.model.norm.weight.shape[0]))

        made: Tensor = runner.generate(**batch, **GREEDY, streamer=Calling(change))
        return made

    other = by_modules(copy.deepcopy(model))
    unchanged = other.generate(**batch, **GREEDY)
    mine, its = results(model), results(other)
    assert torch.equal(mine, its)
    assert not torch.equal(mine, unchanged)


def test_a_hook_on_the_model_sees_every_call() -> None:
    model, calls = patched("llama"), []
    model.register_forward_hook(lambda *given: calls.append(1))
    model.generate(**full_batch(), **GREEDY)
    assert len(calls) == 24
    assert model.accelpatch.report().paths["stock loop: a hook on the model"] == 1
    assert native_steps(model) == 23


def test_the_loop_goes_on_past_the_stores_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_cache, "ROOM", 4)
    model, mine, its = both(lambda: GREEDY, padded_batch())
    assert torch.equal(mine, its)
    assert native_steps(model) == 23


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_kept_scores_and_logits_are_those_of_the_stock_loop(name: str) -> None:
    ask = {"return_dict_in_generate": True, f"output_{name}": True, "min_new_tokens": 24, "eos_token_id": 7}
    _, mine, its = both(lambda: GREEDY | ask, padded_batch())
    assert len(mine[name]) == len(its[name]) == 24
    for one, other in zip(mine[name], its[name], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert bool(mine[name][-1][:, 7].isinf().all()) == (name == "scores")
    assert mine.past_key_values.get_seq_length() == its.past_key_values.get_seq_length()


def test_a_continued_conversation() -> None:
    model = patched("llama")
    batch = {key: value[:1] for key, value in full_batch().items()}
    results = []
    for runner in (model, by_modules(copy.deepcopy(model))):
        first = runner.generate(**batch, **GREEDY, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.tensor([[4, 5, 6]])], dim=1)
        cache = first.past_key_values
        results.append(runner.generate(longer, past_key_values=cache, **GREEDY))
    assert torch.equal(*results)
