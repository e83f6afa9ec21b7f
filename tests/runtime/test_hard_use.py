"""What programs do to a patched model besides generate(): other defaults, changed weights, threads, forks."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import accelpatch
from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from tests.runtime.cpu.test_native_step import by_modules, decode, native_steps, patched
from tests.support.tiny import CAUSAL, full_batch

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("native", [True, False], ids=["steps", "modules"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_the_default_dtype_is_the_programs_own_affair(dtype: torch.dtype, native: bool) -> None:
    model = patched("llama") if native else by_modules(patched("llama"))
    due = model.generate(**full_batch(), **GREEDY)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(model.generate(**full_batch(), **GREEDY), due)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_norms_that_are_written_in_place_are_used(name: str) -> None:
    model, batch = patched(name), full_batch()
    before = decode(model, batch, 3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(-3)
    found = decode(model, batch, 3)
    torch.testing.assert_close(found, decode(by_modules(copy.deepcopy(model)), batch, 3), rtol=2e-4, atol=2e-4)
    assert not torch.allclose(found, before, atol=1e-2)
    assert native_steps(model) == 6


def test_embeddings_in_place_of_ids() -> None:
    model, batch = patched("llama"), full_batch()
    given = {"attention_mask": batch["attention_mask"], **GREEDY}
    rows = model.get_input_embeddings()(batch["input_ids"])
    due = by_modules(copy.deepcopy(model)).generate(inputs_embeds=rows, **given)
    assert torch.equal(model.generate(inputs_embeds=rows, **given), due)


@torch.no_grad()
def test_labels_and_hidden_states_by_the_configuration() -> None:
    model, one = patched("llama"), torch.full((3, 1), 5)
    cache = model(**full_batch(), use_cache=True).past_key_values
    assert model(input_ids=one, past_key_values=cache, labels=one.expand(3, 1)).logits.shape[1] == 1
    model.config.output_hidden_states = True
    out = model(input_ids=one, past_key_values=cache)
    assert len(out.hidden_states) == len(model.model.layers) + 1
    assert native_steps(model) == 0


def test_a_cache_is_kept_on_disk() -> None:
    model, batch = patched("llama"), full_batch()
    made = model.generate(**batch, **GREEDY, return_dict_in_generate=True)
    kept = pickle.loads(pickle.dumps(made.past_key_values))
    longer = torch.cat([made.sequences, torch.full((3, 2), 7)], dim=1)
    found = model.generate(longer, past_key_values=kept, **GREEDY)
    assert torch.equal(found, model.generate(longer, past_key_values=made.past_key_values, **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_cache_of_other_sequences_is_refused_as_the_modules_do(rows: int) -> None:
    model = patched("llama")
    cache = model(**full_batch(), use_cache=True).past_key_values
    model(input_ids=torch.full((3, 1), 5), past_key_values=cache)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        model(input_ids=torch.full((rows, 1), 5), past_key_values=cache)


def test_a_cache_of_inference_mode_goes_on_outside_of_it() -> None:
    model, batch = patched("llama"), full_batch()
    with torch.inference_mode():
        cache = model.generate(**batch, **GREEDY, return_dict_in_generate=True).past_key_values
    model.model.layers[1].register_forward_hook(lambda *given: None)
    with torch.no_grad():
        assert model(input_ids=torch.full((3, 1), 5), past_key_values=cache).logits.isfinite().all()


class Uncounted(Tensor):
    """As tensors of inference mode, but it does not say so."""

    @property
    def _version(self) -> int:
        raise RuntimeError("Inference tensors do not track version counter.")


def test_a_tensor_that_counts_no_writes_stops_no_step() -> None:
    model = CAUSAL["llama"].make()
    model.register_buffer("odd", torch.zeros(2).as_subclass(Uncounted), persistent=False)
    accelpatch.patch(model, "int8", verify=False)
    assert torch.equal(model.generate(**full_batch(), **GREEDY), patched("llama").generate(**full_batch(), **GREEDY))
    assert native_steps(model)


def test_a_model_patched_in_inference_mode_goes_on_outside_of_it() -> None:
    batch = full_batch()
    expected = patched("llama").generate(**batch, **GREEDY)
    model = CAUSAL["llama"].make()
    with torch.inference_mode():
        accelpatch.patch(model, "int8", verify=False)
    assert torch.equal(model.generate(**batch, **GREEDY), expected)


@torch.no_grad()
def test_a_hook_that_gives_another_shape_is_an_error() -> None:
    model = patched("llama")
    cache = model(**full_batch(), use_cache=True).past_key_values
    model.model.layers[0].register_forward_hook(lambda module, args, output: output[:1])
    with pytest.raises(KernelError, match=r"layer 0 gave .* look at its hooks"):
        model(input_ids=torch.full((3, 1), 5), past_key_values=cache)


def test_a_hook_set_by_a_constraint_is_served() -> None:
    model, calls = patched("llama"), []

    def allowed(row: int, ids: Tensor) -> list[int]:
        if row == 0 and ids.shape[0] == full_batch()["input_ids"].shape[1] + 3:
            model.model.layers[0].register_forward_hook(lambda *given: calls.append(1))
        return list(range(160))

    model.generate(**full_batch(), **GREEDY, prefix_allowed_tokens_fn=allowed)
    assert len(calls) == 4


def test_a_weight_replaced_by_another_thread() -> None:
    model, batch, done = patched("llama"), full_batch(), threading.Event()
    due = model.generate(**batch, **GREEDY)

    def run() -> list[bool]:
        return [torch.equal(model.generate(**batch, **GREEDY), due) for _ in range(12)]

    def replace() -> None:
        while not done.wait(0.002):
            model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone(), requires_grad=False)

    other, interval = threading.Thread(target=replace), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as runners:
            other.start()
            found = [runner.result() for runner in (runners.submit(run), runners.submit(run))]
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(interval)
    assert found == [[True] * 12] * 2


class Forking(BaseStreamer):
    """Forks at its third put; the child generates on its own and says whether it could."""

    def __init__(self, model: Any, due: Tensor) -> None:
        self.puts, self.status = 0, -1
        self._model, self._due = model, due

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            child = os.fork()
            if child == 0:
                batch = {key: rows[:1] for key, rows in full_batch().items()}
                os._exit(0 if torch.equal(self._model.generate(**batch, **GREEDY), self._due) else 1)
            self.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def end(self) -> None:
        """Nothing is left."""


def test_a_fork_within_the_loop(threads: None) -> None:
    torch.set_num_threads(2)
    model, batch = patched("llama"), {key: rows[:1] for key, rows in full_batch().items()}
    streamer = Forking(model, model.generate(**batch, **GREEDY))
    model.generate(**batch, **GREEDY, streamer=streamer)
    assert streamer.status == 0


def test_a_new_thread_has_torchs_number_of_threads(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.kernels.cpu import decode_step

    model, seen, stock = patched("llama"), set(), decode_step.threads
    monkeypatch.setattr(decode_step, "threads", lambda: seen.add(stock()) or stock())
    torch.set_num_threads(1)
    thread = threading.Thread(target=lambda: model.generate(**full_batch(), **GREEDY))
    thread.start()
    thread.join()
    assert seen == {1}
