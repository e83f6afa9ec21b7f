"""Native steps behind stock generate() and forward: the numbers of the modules, for as long as nobody looks inside."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import accelpatch
from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.generation.patched_model import RUNTIME
from tests.support.simulated import assert_float_rule, simulated
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, EXPERTS, full_batch, padded_batch

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
STEPPING = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
SPARSE = ["mixtral", "qwen3_moe", "gpt_oss"]
MODULES = ["phi3", "opt", "gpt2", "gpt_neox", "bloom", "falcon", "olmoe"]
MODELS = {**CAUSAL, **EXPERTS}
STEPS = 64
MXFP4 = parse("extends: int8\nrules:\n  - name: experts\n    replace: mxfp4_experts\n    options: {}\n")


def patched(name: str, recipe: Any = "int8") -> nn.Module:
    return accelpatch.patch(MODELS[name].make(), recipe, verify=False)


def native_steps(model: nn.Module) -> int:
    return model.accelpatch.report().paths.get(NATIVE, 0)


def by_modules(model: nn.Module) -> nn.Module:
    """The same patched model without its native steps."""
    vars(model)[RUNTIME] = None
    return model


@torch.no_grad()
def decode(model: nn.Module, batch: dict[str, Tensor], steps: int) -> Tensor:
    """Logits [B, steps, V] of a fixed continuation, token by token over the model's own cache."""
    out = model(**batch, use_cache=True)
    mask, cache, found = batch["attention_mask"], out.past_key_values, []
    for step in range(steps):
        ids = torch.full((mask.shape[0], 1), 3 + 7 * step % 150)
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        positions = mask.long().sum(1, keepdim=True) - 1
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        found.append(out.logits[:, -1])
    return torch.stack(found, dim=1)


def decode_alone(model: nn.Module, batch: dict[str, Tensor], steps: int) -> Tensor:
    """The same, each row by itself without its padding: torch's float64 attention gives NaN where all is masked."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        rows.append(decode(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, steps))
    return torch.cat(rows)


@pytest.mark.each_value
@spread("name, recipe", STEPPING, ["int8", "int4", "exact"])
def test_logits_of_64_steps(name: str, recipe: str) -> None:
    hold_64_steps(name, recipe)


@pytest.mark.each_value
@spread("name, recipe", SPARSE, {"int8": "int8", "int4": "int4", "mxfp4": MXFP4})
def test_logits_of_64_steps_with_experts(name: str, recipe: Any) -> None:
    hold_64_steps(name, recipe)


def hold_64_steps(name: str, recipe: Any) -> None:
    original, batch = MODELS[name].make(), padded_batch()
    plan = accelpatch.plan(original, recipe)
    exact = decode_alone(simulated(original, plan, torch.float64), batch, STEPS)
    model = patched(name, recipe)
    found = decode(model, batch, STEPS)
    assert native_steps(model) == STEPS
    plain = decode(by_modules(model), batch, STEPS)
    assert native_steps(model) == STEPS
    assert_float_rule(found, exact, plain)


@pytest.mark.parametrize("name", MODULES)
def test_other_families_run_their_modules(name: str) -> None:
    model = patched(name)
    tokens = model.generate(**padded_batch(), max_new_tokens=5, do_sample=False)
    assert native_steps(model) == 0
    assert torch.equal(tokens, by_modules(model).generate(**padded_batch(), max_new_tokens=5, do_sample=False))
    assert any(path.startswith("modules: ") for path in model.accelpatch.report().to_dict()["paths"])


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 2, "do_sample": False},
    "repetition": {"do_sample": False, "repetition_penalty": 1.5},
    "scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "at-least": {"do_sample": False, "min_new_tokens": 20, "eos_token_id": [5, 9, 10**6]},
    "at-least-then-penalty": {"do_sample": False, "min_length": 30, "repetition_penalty": 1.5, "eos_token_id": 5},
    "several-ends": {"do_sample": False, "eos_token_id": list(range(40)), "pad_token_id": 0},
    "time": {"do_sample": False, "max_time": 600.0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [full_batch, padded_batch], ids=["one-row", "left-padding"])
def test_generate_gives_the_tokens_of_the_modules(way: str, batch: Callable[[], dict[str, Tensor]]) -> None:
    options, inputs = WAYS[way] | {"max_new_tokens": 24}, batch()
    if way == "lookup":
        inputs = {key: value[:1] for key, value in inputs.items()}
    model = patched("llama")
    results = []
    for runner in (model, by_modules(copy.deepcopy(model))):
        torch.manual_seed(5)
        made = runner.generate(**inputs, **options)
        results.append(made if isinstance(made, Tensor) else made.sequences)
    assert torch.equal(*results)
    assert native_steps(model) > 0 or way == "lookup"


def test_beams_over_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.runtime.cpu.native_cache.ROOM", 4)
    model, options = patched("llama"), {"num_beams": 2, "do_sample": False, "max_new_tokens": 40}
    due = by_modules(copy.deepcopy(model)).generate(**full_batch(), **options)
    assert torch.equal(model.generate(**full_batch(), **options), due)
    assert native_steps(model) >= 30


def test_the_cache_shows_what_the_modules_would_have_cached() -> None:
    model, batch = patched("qwen3"), full_batch()
    caches = []
    for runner in (model, by_modules(copy.deepcopy(model))):
        cache = DynamicCache(config=runner.config)
        runner.generate(**batch, past_key_values=cache, max_new_tokens=9, do_sample=False)
        caches.append(cache)
    one, other = caches
    assert one.get_seq_length() == other.get_seq_length() == batch["input_ids"].shape[1] + 8
    for mine, its in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys, its.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values, its.values, rtol=1e-4, atol=1e-5)


def test_steps_go_on_after_the_cache_was_cropped_and_extended() -> None:
    model, batch = patched("llama"), full_batch()
    results = []
    for runner in (model, by_modules(copy.deepcopy(model))):
        with torch.no_grad():
            cache = runner(**batch, use_cache=True).past_key_values
            for _ in range(3):
                runner(input_ids=torch.full((3, 1), 5), past_key_values=cache)
            cache.crop(-2)
            runner(input_ids=torch.tensor([[6, 7, 8]] * 3), past_key_values=cache)
            results.append(runner(input_ids=torch.full((3, 1), 9), past_key_values=cache).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert native_steps(model) == 4


def test_a_store_grows_past_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.runtime.cpu.native_cache.ROOM", 4)
    model = patched("llama")
    tokens = model.generate(**full_batch(), max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert native_steps(model) == 39
    due = by_modules(model).generate(**full_batch(), max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert torch.equal(tokens, due)


def test_hidden_states_of_each_step() -> None:
    model = patched("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    made = model.generate(**full_batch(), **options)
    assert [len(step) for step in made.hidden_states] == [len(model.model.layers) + 1] * 4
    assert native_steps(model) == 0
    again = model.generate(**full_batch(), max_new_tokens=4, do_sample=False)  # transformers' hooks stay, and are idle
    assert torch.equal(again, made.sequences)
    assert native_steps(model) == 3
    after = model.generate(**full_batch(), **options).hidden_states
    assert torch.equal(after[3][-1], made.hidden_states[3][-1])
    assert native_steps(model) == 3


def test_the_report_of_a_copy_counts_what_the_copy_runs() -> None:
    model = patched("llama")
    model.generate(**full_batch(), max_new_tokens=4, do_sample=False)
    twin = copy.deepcopy(model)
    assert not twin.accelpatch.report().paths
    twin.generate(**full_batch(), max_new_tokens=3, do_sample=False)
    assert (native_steps(model), native_steps(twin)) == (3, 2)


def test_gradients_on_run_the_modules() -> None:
    model, batch = patched("llama"), full_batch()
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
    model(input_ids=torch.full((3, 1), 5), past_key_values=cache)
    assert native_steps(model) == 0


def test_unpatching_leaves_no_step() -> None:
    model = patched("llama")
    model.generate(**full_batch(), max_new_tokens=3, do_sample=False)
    accelpatch.unpatch(model)
    assert RUNTIME not in vars(model)
    assert type(model).forward is type(CAUSAL["llama"].make()).forward


def test_two_models_in_two_threads() -> None:
    models = [patched("llama"), patched("qwen3", "int4")]
    inputs = padded_batch()
    due = [model.generate(**inputs, max_new_tokens=12, do_sample=False) for model in models]
    wrong: list[int] = []

    def many(index: int) -> None:
        for _ in range(5):
            if not torch.equal(models[index].generate(**inputs, max_new_tokens=12, do_sample=False), due[index]):
                wrong.append(index)

    threads = [threading.Thread(target=many, args=(index % 2,)) for index in range(4)]  # two threads a model
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("threads", [1, 2])
def test_fork_after_a_patch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = patched("llama")
        due = model.generate(**full_batch(), max_new_tokens=8, do_sample=False)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(model.generate(**full_batch(), max_new_tokens=8, do_sample=False), due) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


class Breaking(BaseStreamer):
    """Takes three tokens, then fails."""

    def __init__(self) -> None:
        self.taken: Queue[Tensor] = Queue()

    def put(self, value: Tensor) -> None:
        self.taken.put(value)
        if self.taken.qsize() > 3:
            raise RuntimeError("the reader is gone")

    def end(self) -> None:
        raise AssertionError("never reached")


def test_an_exception_in_a_streamer_leaves_nothing_behind() -> None:
    model = patched("llama")
    due = model.generate(**full_batch(), max_new_tokens=8, do_sample=False)
    with pytest.raises(RuntimeError, match="the reader is gone"):
        model.generate(**full_batch(), max_new_tokens=8, do_sample=False, streamer=Breaking())
    assert torch.equal(model.generate(**full_batch(), max_new_tokens=8, do_sample=False), due)


def test_a_batch_over_the_limit_runs_the_modules() -> None:
    model, batch = patched("llama"), full_batch()
    wide = {key: value[:1].repeat(9, 1) for key, value in batch.items()}
    made = model.generate(**wide, max_new_tokens=5, do_sample=False)
    assert native_steps(model) == 0
    assert torch.equal(
        made[:1], model.generate(**{k: v[:1] for k, v in wide.items()}, max_new_tokens=5, do_sample=False)
    )
    assert native_steps(model) == 4
