"""Continuous batching of patched models: transformers' own tokens, and this package's attention again after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import accelpatch
from accelpatch.modules.attention_settings import NAME, SETTING
from accelpatch.recipe.recipe import parse
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, full_batch

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20, 21, 22, 23, 24, 25]]
TEXT = "extends: flash\nrules:\n  - name: first\n    match: {name: 'model.layers.0.*', role: attention}\n"
PARTLY = parse(TEXT + "    replace: keep\n")
RECIPES: dict[str, Any] = {"exact": "exact", "int8": "int8", "flash": "flash", "partly": PARTLY}
#: small caches, and no flash-attn that happens to be installed
SIZES: dict[str, Any] = {"block_size": 16, "num_blocks": 16, "max_batch_tokens": 64}


def options() -> dict[str, Any]:
    config = ContinuousBatchingConfig(**SIZES)
    if hasattr(config, "auto_switch_to_flash"):
        config.auto_switch_to_flash = False
    text = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return {"generation_config": text, "continuous_batching_config": config}


def made(implementation: str, recipe: Any = None) -> Any:
    model: Any = CAUSAL["llama"].make()
    model.set_attn_implementation(implementation)
    return model if recipe is None else accelpatch.patch(model, recipe, verify=False)


def by_generate_batch(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    done = model.generate_batch(prompts, warmup=False, **options())
    return [one.generated_tokens for one in done.values()]


def by_context(model: Any) -> list[list[int]]:
    with model.continuous_batching_context_manager(warmup=False, **options()) as manager:
        return _tokens(manager)


def by_manager(model: Any) -> list[list[int]]:
    manager = model.init_continuous_batching(**options())
    manager.start()
    try:
        return _tokens(manager)
    finally:
        manager.stop(block=True)


def by_kept_manager(model: Any) -> list[list[int]]:
    """The second call uses the manager of the first one."""
    found = [
        model.generate_batch(PROMPTS, warmup=False, persistent_manager=True, **options()) for _ in range(2)
    ]  # fmt: skip
    tokens = [[one.generated_tokens for one in done.values()] for done in found]
    assert tokens[0] == tokens[1]
    model.destroy_cached_continuous_batching_manager()
    return tokens[0]


def _tokens(manager: Any) -> list[list[int]]:
    names = manager.add_requests(PROMPTS, max_new_tokens=4)
    done: dict[str, Any] = {}
    while len(done) < len(PROMPTS):
        result = manager.get_result(timeout=20)
        assert result is not None
        if result.is_finished():
            done[result.request_id] = result.generated_tokens
    return [done[name] for name in (names or sorted(done))]


WAYS: dict[str, Callable[[Any], list[list[int]]]] = {
    "generate_batch": by_generate_batch, "context": by_context, "manager": by_manager, "kept": by_kept_manager,
}  # fmt: skip


def names(model: Any) -> list[Any]:
    """The implementations that the model and its attention modules name."""
    return [vars(one.config)[SETTING] for one in (model, *(layer.self_attn for layer in model.model.layers))]


@pytest.mark.each_value
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("way", "recipe"),
    [*((way, "flash") for way in WAYS), *(("generate_batch", recipe) for recipe in RECIPES if recipe != "flash")],
)
def test_tokens_are_those_of_stock(way: str, recipe: str, implementation: str) -> None:
    due = by_generate_batch(made(implementation))
    model = made(implementation, RECIPES[recipe])
    before = names(model)
    assert WAYS[way](model) == due
    assert names(model) == before
    assert (NAME in before) == (recipe in ("flash", "partly"))
    ids = torch.tensor(PROMPTS[:1])
    assert model.generate(ids, max_new_tokens=4, do_sample=False)[0, 4:].tolist() == due[0]
    accelpatch.unpatch(model)
    assert set(names(model)) == {implementation}


@pytest.mark.parametrize(
    "recipe", [pytest.param(one, marks=pytest.mark.nightly if one != "flash" else ()) for one in RECIPES]
)
def test_one_prompt_of_one_row(recipe: str, machine: str) -> None:
    """Whose calls are for one token, over pages."""
    due = by_generate_batch(made("sdpa"), PROMPTS[:1])
    model = made("sdpa", RECIPES[recipe])
    assert by_generate_batch(model, PROMPTS[:1]) == due
    assert model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False)[0, 4:].tolist() == due[0]
    assert by_generate_batch(model, PROMPTS[:1]) == due


def _in_init(patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    patch.setattr(ContinuousBatchingManager, "__init__", fail)


def _after_the_switch(patch: pytest.MonkeyPatch) -> None:
    """transformers has given the model another implementation by then."""
    own = ContinuousBatchingManager.__init__

    def fail(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        own(self, model, *args, **kwargs)
        raise RuntimeError("on purpose")

    patch.setattr(ContinuousBatchingManager, "__init__", fail)


def _in_start(patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    patch.setattr(ContinuousBatchingManager, "start", fail)


@pytest.mark.each_value
@spread(
    "fail, recipe, implementation",
    {"init": _in_init, "switched": _after_the_switch, "start": _in_start}, ["flash", "partly"], ["sdpa", "eager"],
)  # fmt: skip
def test_an_exception_leaves_this_attention(
    fail: Callable[[pytest.MonkeyPatch], None], recipe: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(implementation, RECIPES[recipe])
    before = names(model)
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(RuntimeError, match="on purpose"):
            by_generate_batch(model)
        assert names(model) == before
    assert by_generate_batch(model) == by_generate_batch(made(implementation))
    assert names(model) == before


def test_an_exception_in_the_context_leaves_this_attention() -> None:
    model = made("eager", "flash")
    with (
        contextlib.suppress(KeyError),
        model.continuous_batching_context_manager(warmup=False, **options()) as manager,
    ):
        assert NAME not in names(model)
        assert manager.is_running()
        raise KeyError
    assert set(names(model)) == {NAME}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("recipe", ["exact", "flash"])
def test_calls_meanwhile_have_their_masks(recipe: str, implementation: str) -> None:
    """Those without pages, by the originals' attention. (transformers' own have none meanwhile: with `eager` each token
    sees those after it.)"""
    model, batch = made(implementation, recipe), full_batch()
    with torch.no_grad():
        before = model(**batch).logits
        with model.continuous_batching_context_manager(warmup=False, **options()):
            meanwhile = model(**batch).logits
        torch.testing.assert_close(meanwhile, before, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(**batch).logits, before)


def test_a_manager_that_is_dropped_is_over() -> None:
    model = made("sdpa", "flash")
    manager = model.init_continuous_batching(**options())
    assert NAME not in names(model)
    del manager
    assert set(names(model)) == {NAME}


def test_it_begins_after_the_calls_of_other_threads() -> None:
    """A call that began with masks of this attention ends with it."""
    model, batch = made("sdpa", "flash"), full_batch()
    with torch.no_grad():
        due = model(**batch).logits
    inside, go, found = threading.Event(), threading.Event(), []

    def stop(*args: Any) -> None:
        inside.set()
        go.wait(5)

    def call() -> None:
        with torch.no_grad():
            found.append(model(**batch).logits)

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(20)
    other = threading.Thread(target=lambda: found.append(by_generate_batch(model)))
    other.start()
    other.join(0.5)
    assert set(names(model)) == {NAME}
    handle.remove()
    go.set()
    thread.join()
    other.join()
    assert torch.equal(found[0], due)
    assert found[1] == by_generate_batch(made("sdpa"))


def test_the_first_use_may_be_a_batch() -> None:
    model, patched = made("sdpa"), []
    with accelpatch.patch_on_first_use("flash", verify=False, on_patched=patched.append):
        found = by_generate_batch(model)
        assert patched == [model]
        assert set(names(model)) == {NAME}
    assert found == by_generate_batch(made("sdpa"))
