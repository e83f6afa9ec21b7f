"""Methods that a program sets on a KV cache, or on one of its layers: the modules call them, as they do unpatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_form import METHODS
from tests.runtime.test_caches import NAMES, assert_same, begun, given, steps_of
from tests.support.tiny import CAUSAL, full_batch


def halved(method: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """Keys and values of another size are cached."""
    return lambda keys, values, *args, **kwargs: method(keys, 0.5 * values, *args, **kwargs)


def shifted(method: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """A token more is said to be there than there is."""
    return lambda *args, **kwargs: method(*args, **kwargs) + 1


def wider(method: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """The first key is said to lie further back."""

    def sizes(*args: Any, **kwargs: Any) -> Any:
        length, offset = method(*args, **kwargs)
        return length, offset - 1

    return sizes


def noted(method: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        called.append(method.__name__)
        return method(*args, **kwargs)

    return call


CHANGED: dict[str, Callable[..., Any]] = {
    "update": halved,
    "get_seq_length": shifted,
    "get_mask_sizes": wider,
    "crop": noted,
    "reorder_cache": noted,
}
OWNERS: dict[str, Callable[[Any], Any]] = {
    "cache": lambda cache: cache,
    "first layer": lambda cache: cache.layers[0],
    "last layer": lambda cache: cache.layers[-1],
}


def put(cache: Any, owner: str, name: str, called: list[str]) -> None:
    one = OWNERS[owner](cache)
    setattr(one, name, CHANGED[name](getattr(one, name), called))


def run(model: Any, owner: str, name: str, after: int | None) -> list[Any]:
    """What a model gives over a cache with a method that is set after the prompt and `after` steps; None: before."""
    called: list[str] = []
    found: list[Any] = []
    with torch.no_grad():
        try:
            if after is None:
                cache = DynamicCache(config=model.config)
                put(cache, owner, name, called)
                found.append(model(full_batch()["input_ids"], **{CACHE: cache}).logits)
            else:
                cache = begun(model, after)
                put(cache, owner, name, called)
            found += [given(model, cache, length, 9) for length in (1, 1, 2, 1)]
            cache.crop(-1)
            cache.reorder_cache(torch.tensor([2, 0, 1]))
            found.append(given(model, cache, 1, 8))
        except (RuntimeError, ValueError, IndexError) as error:
            found.append(error)
    return [*found, *called, *(one for layer in cache.layers for one in (layer.keys, layer.values))]


def test_every_method_has_a_case() -> None:
    assert set(CHANGED) == METHODS


@pytest.mark.each_value
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("after", [None, 0, 2], ids=["before", "after-the-prompt", "after-steps"])
def test_the_modules_call_it(after: int | None, owner: str, name: str, machine: str) -> None:
    model = CAUSAL["gemma3"].make()
    its = run(model, owner, name, after)
    patched = accelpatch.patch(model, "exact", verify=False)
    assert_same(run(patched, owner, name, after), its)
    assert steps_of(patched) == (after or 0)


@torch.no_grad()
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("owner", OWNERS)
def test_generate_calls_it(owner: str, family: str, machine: str) -> None:
    """Of its own steps too, whose cache is the one that was given."""

    def generated(model: Any) -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        put(cache, owner, "update", [])
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        made = model.generate(**full_batch(), **options, output_scores=True, **{CACHE: cache})
        return [made.sequences, *made.scores, *(layer.values for layer in cache.layers)]

    model = CAUSAL[family].make()
    its = generated(model)
    patched = accelpatch.patch(model, "exact", verify=False)
    assert_same(generated(patched), its)
    assert steps_of(patched) == 0


@torch.no_grad()
@pytest.mark.parametrize("owner", OWNERS)
def test_steps_go_on_where_it_is_gone(owner: str, machine: str) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    cache = begun(model)
    put(cache, owner, "update", [])
    given(model, cache, 1, 9)
    assert steps_of(model) == 2
    del OWNERS[owner](cache).update
    given(model, cache, 1, 9)
    assert steps_of(model) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["update", "get_seq_length", "reorder_cache"])
def test_a_method_that_was_taken_of_a_layer(name: str, machine: str) -> None:
    """It does the same before and after the layer gets tensors of its own, and when it is taken up into steps again."""

    def called(model: Any) -> list[Any]:
        cache = begun(model)
        layer, found = cache.layers[1], []
        method = getattr(layer, name)
        new = torch.ones_like(layer.keys[:, :, :1])
        args = {"update": (new, new), "get_seq_length": (), "reorder_cache": (torch.tensor([2, 0, 0]),)}[name]
        for _ in range(2):
            found += [method(*args), layer.keys.clone()]
            cache.batch_select_indices(torch.tensor([0, 1, 2]))
            found += [method(*args), layer.keys.clone()]
            if name == "update":
                cache.layers[0].update(new, new)
                cache.layers[0].update(new, new)
            given(model, cache, 1, 9)
        return [one for made in found for one in (made if isinstance(made, tuple) else (made,))]

    model = CAUSAL["llama"].make()
    its = called(model)
    assert_same(called(accelpatch.patch(model, "exact", verify=False)), its)
