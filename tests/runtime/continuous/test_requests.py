"""What may happen to requests of continuous batching happens on a patched model as on the original."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

import accelpatch
from accelpatch.modules import attention_settings as attention
from accelpatch.runtime.continuous.step import CONTINUOUS, PLAIN_CACHE, STOCK
from accelpatch.runtime.generation.patched_model import RUNTIME
from tests.runtime.continuous.test_families import FAMILIES, NEW, agrees, options, prompts
from tests.support.tiny import CAUSAL

ASKED = prompts(5, 17, 9, 30, 2, 11)


def made(recipe: str | None = "exact", name: str = "llama") -> Any:
    model: Any = CAUSAL[name].make()
    return model if recipe is None else accelpatch.patch(model, recipe, verify=False)


def text(**given: Any) -> GenerationConfig:
    usual = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**usual | given)


def tokens(done: dict[str, Any]) -> list[list[int]]:
    return [one.generated_tokens for one in done.values()]


def test_a_cache_that_is_full(machine: str) -> None:
    """Requests wait, or give their pages up and come again; none is lost."""
    model = made()
    done = model.generate_batch(ASKED, **options(num_blocks=6))
    assert len(done) == len(ASKED)
    assert all(agrees(model, p, found) for p, found in zip(ASKED, tokens(done), strict=True))


def test_a_request_longer_than_the_cache() -> None:
    found = []
    for recipe in (None, "exact"):
        done = made(recipe).generate_batch([ASKED[0], prompts(70)[0]], **options(num_blocks=6))
        found.append([(one.status.name, one.generated_tokens, type(one.error)) for one in done.values()])
    assert found[0] == found[1]


def test_an_end_token_at_once(machine: str) -> None:
    model = made()
    first = tokens(model.generate_batch(ASKED, **options()))
    given = options() | {"generation_config": text(eos_token_id=first[1][0])}
    done = tokens(model.generate_batch(ASKED, **given))
    assert done[1] == first[1][:1]
    for before, after in zip(first, done, strict=True):
        assert after == before[: len(after)]
        assert len(after) == NEW or after[-1] == first[1][0]


def test_cancelled_in_the_middle(machine: str) -> None:
    """The others go on, and the pages are free again."""
    model = made()
    given = options() | {"generation_config": text(max_new_tokens=40)}
    with model.continuous_batching_context_manager(**given) as manager:
        long = manager.add_request(ASKED[0], max_new_tokens=80, streaming=True)
        assert manager.get_result(timeout=60).request_id == long
        other = manager.add_request(ASKED[1], max_new_tokens=NEW)
        manager.cancel_request(long)
        while (result := manager.get_result(timeout=60)) is None or result.request_id != other:
            assert result is not None
        assert agrees(model, ASKED[1], result.generated_tokens)
    assert tokens(model.generate_batch(ASKED[:1], **options()))[0]


def test_several_models_in_one_process(machine: str) -> None:
    one, other, stock = made(), made("int8", "qwen2"), made(None)
    with (
        one.continuous_batching_context_manager(**options()) as first,
        other.continuous_batching_context_manager(**options()) as second,
    ):
        for manager in (first, second):
            manager.add_request(ASKED[2], max_new_tokens=NEW)
        found = [manager.get_result(timeout=60).generated_tokens for manager in (first, second)]
    assert all(agrees(model, ASKED[2], answer) for model, answer in zip((one, other), found, strict=True))
    assert len(tokens(stock.generate_batch(ASKED[:2], **options()))) == 2


@pytest.mark.parametrize("recipe", ["exact", "flash"])
def test_two_managers_of_one_model(machine: str, recipe: str) -> None:
    """The one goes on when the other has stopped, and the last one leaves the model as it was."""
    model = made(recipe)
    names, asked = attention.names(model), {key: one for key, one in options().items() if key != "warmup"}
    first, second = (model.init_continuous_batching(**asked) for _ in range(2))
    for manager in (first, second):
        manager.start()
    found = []
    for manager, prompt in ((first, ASKED[2]), (second, ASKED[1])):
        manager.add_request(prompt, max_new_tokens=NEW)
        found.append(agrees(model, prompt, manager.get_result(timeout=60).generated_tokens))
    first.stop()
    for prompt in ASKED[:3]:
        second.add_request(prompt, request_id=str(len(prompt)), max_new_tokens=NEW)
    answers = {one.request_id: one.generated_tokens for one in (second.get_result(timeout=60) for _ in range(3))}
    second.stop()
    assert all(found + [agrees(model, prompt, answers[str(len(prompt))]) for prompt in ASKED[:3]])
    assert STOCK not in model.accelpatch.report().paths
    assert attention.names(model) == names


def test_shared_prefixes_and_several_answers(machine: str) -> None:
    """The second prompt reads the first one's pages, and answers of one prompt fork it."""
    model, shared = made(), prompts(40)[0]
    asked = [[*shared, 7], [*shared, 9], shared]
    kept = options() | {"persistent_manager": True}
    for _ in range(2):
        done = tokens(model.generate_batch(asked, **kept))
        assert all(agrees(model, p, found) for p, found in zip(asked, done, strict=True))
    model.destroy_cached_continuous_batching_manager()
    several = text(num_return_sequences=2, do_sample=True, top_k=1)
    twice = model.generate_batch(asked[:1], **options() | {"generation_config": several})
    assert len({tuple(one) for one in tokens(twice)}) == 1


def test_sampling_and_log_probabilities(machine: str) -> None:
    """Greedy tokens' log-probabilities are those of the logits; a seed gives the same draws again."""
    model = made()
    done = model.generate_batch(ASKED[:2], **options(return_logprobs=True))
    for prompt, one in zip(ASKED, done.values(), strict=False):
        ids = torch.tensor([prompt + one.generated_tokens])
        with torch.no_grad():
            due = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(one.logprobs), due.max(-1).values, rtol=1e-3, atol=1e-3, check_dtype=False
        )
    sampling = options(seed=3) if "seed" in vars(ContinuousBatchingConfig()) else options()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        given = sampling | {"generation_config": text(do_sample=True, temperature=1.5, top_k=20)}
        found.append(tokens(model.generate_batch(ASKED[:1], **given)))
    assert found[0] == found[1]


def test_padded_calls(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' graphs have them: tokens and indices behind the last request are padding."""
    own = ModelRunner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    for name in ("llama", "gemma3") if "gemma3" in FAMILIES else ("llama",):
        model = made(name=name)
        done = model.generate_batch(ASKED, **options(q_padding_interval_size=8, kv_padding_interval_size=32))
        assert all(agrees(model, p, found) for p, found in zip(ASKED, tokens(done), strict=True)), name


def test_a_hook_sees_its_layer(machine: str) -> None:
    model, seen = made(), list[int]()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    found = tokens(model.generate_batch(ASKED[:2], **options()))
    assert sum(seen) >= len(ASKED[0]) + len(ASKED[1])
    assert found == tokens(made().generate_batch(ASKED[:2], **options()))


@pytest.mark.parametrize("begin", [lambda model: model.set_attn_implementation("paged|eager")], ids=["named"])
def test_an_implementation_of_the_users_own_choice_stays(begin: Callable[[Any], None]) -> None:
    model = made()
    begin(model)
    model.generate_batch(ASKED[:2], **options())
    assert model.accelpatch.report().paths[STOCK] > 0
    assert model.config._attn_implementation == "paged|eager"


def test_the_report_says_what_ran(machine: str) -> None:
    model = made()
    model.generate_batch(ASKED[:2], **options())
    paths = [path for path in model.accelpatch.report().paths if path.startswith(CONTINUOUS)]
    due = ["fused layers"] if machine != "cpu" else ["native rows", "native step"]  # prompts, and tokens of a few
    assert sorted(paths) == [f"{CONTINUOUS}, {one}" for one in due]


def test_a_cache_in_8_bits_is_for_generate_alone(machine: str) -> None:
    recipe = {"extends": "exact", "runtime": {"kv_cache": "int8"}}
    model = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False)
    due = tokens(made().generate_batch(ASKED[:2], **options()))
    assert tokens(model.generate_batch(ASKED[:2], **options())) == due
    assert model.accelpatch.report().paths[PLAIN_CACHE + "int8"] > 0


@pytest.mark.parametrize("machine", ["as a gpu"], indirect=True)
def test_another_thread_within_a_call(machine: str) -> None:
    """Its step and this one would write into the same buffers: modules run, with the same tokens."""
    model, held, over = made(), threading.Event(), threading.Event()

    def within() -> None:
        with vars(model)[RUNTIME].lock:
            held.set()
            over.wait(60)

    other = threading.Thread(target=within)
    other.start()
    held.wait()
    done = tokens(model.generate_batch(ASKED[:2], **options()))
    over.set()
    other.join()
    paths = [path for path in model.accelpatch.report().paths if path.startswith(CONTINUOUS)]
    assert paths == [f"{CONTINUOUS}, modules: another thread is within a call of the model"]
    assert done == tokens(made().generate_batch(ASKED[:2], **options()))
