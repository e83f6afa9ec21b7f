"""What a program does with a KV cache between calls: steps give what the unpatched model gives over that cache."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import accelpatch
from accelpatch.fusion.cache_name import CACHE, FORMER
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import CAUSAL, full_batch

NAMES = ("llama", "mistral", "gemma3")  # full attention, windows of 5 tokens, and both
Change = Callable[[Any], Any]


def caches(model: Any, change: Change, steps: int = 3) -> list[Any]:
    """What a model gives after a prompt, steps and `change`, over one cache; and what that holds then."""
    with torch.no_grad():
        cache, found = begun(model), []
        try:
            cache = change(cache) or cache
            found += [given(model, cache, 1, 9 + step) for step in range(steps)]
            found += [given(model, cache, 2, 7), given(model, cache, 1, 8)]
        except Exception as error:  # noqa: BLE001
            found.append(error)
        found += [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
        return [*found, cache.get_seq_length(), [layer.get_seq_length() for layer in cache.layers]]


def begun(model: Any, steps: int = 2) -> Any:
    cache = DynamicCache(config=model.config)
    for ids in (full_batch()["input_ids"], *(torch.full((3, 1), 5 + step) for step in range(steps))):
        model(ids, **{CACHE: cache})
    return cache


def given(model: Any, cache: Any, length: int, token: int) -> Tensor:
    rows = next((len(layer.keys) for layer in cache.layers if layer.keys is not None and layer.keys.dim() > 1), 3)
    logits: Tensor = model(torch.full((rows, length), token), **{CACHE: cache}).logits
    return logits


def assert_same(mine: list[Any], its: list[Any]) -> None:
    for one, other in zip(mine, its, strict=True):
        if isinstance(other, Exception):
            assert (type(one), str(one)) == (type(other), str(other)), repr(one)
        elif isinstance(other, Tensor) and other.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        else:
            assert type(one) is type(other)
            assert one is None or bool(torch.as_tensor(one == other).all()), (one, other)


def cut(place: int, first: int, names: tuple[str, ...] = ("keys", "values")) -> Change:
    """Tokens evicted from one layer, as a program that compresses caches does it."""

    def change(cache: Any) -> None:
        layer = cache.layers[place]
        for name in names:
            setattr(layer, name, getattr(layer, name)[:, :, first:])

    return change


def each(change: Callable[[Any], Any]) -> Change:
    def all_of(cache: Any) -> None:
        for layer in cache.layers:
            change(layer)

    return all_of


def fewer_heads(cache: Any) -> None:
    cache.layers[1].keys, cache.layers[1].values = cache.layers[1].keys[:, :1], cache.layers[1].values[:, :1]


def a_masked_head(cache: Any) -> None:
    cache.layers[1].keys[:, 1, 2:5] = -1e4


def doubled(layer: Any) -> None:
    layer.keys, layer.values = (torch.cat((one, one), 2) for one in (layer.keys, layer.values))


def in_another_cache(cache: Any) -> Any:
    other = DynamicCache()
    other.layers = list(cache.layers)
    return other


def with_another_layer(cache: Any) -> None:
    cache.layers[1] = copy.deepcopy(cache.layers[0])


def without_config(cache: Any) -> Any:
    other = DynamicCache()
    for place, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, place)
    return other


def cumulative(cache: Any) -> None:
    cache.layers[1].cumulative_length = 7


def recorded_and_cropped(cache: Any) -> None:
    cache.activate_past_recording()
    cache.crop(-1)


def written_in_place(cache: Any) -> None:
    cache.layers[0].keys.mul_(0.5)
    cache.layers[1].values[:, :, -2:] = 0.25


def window(cache: Any) -> None:
    for layer in cache.layers:
        layer.sliding_window = 4


CHANGES: dict[str, Change] = {
    "a shorter layer": cut(1, 2),
    "a shorter first layer": cut(0, 2),
    "shorter layers": each(
        lambda layer: [setattr(layer, name, getattr(layer, name)[:, :, 2:]) for name in ("keys", "values")]
    ),
    "values shorter than keys": cut(0, 2, ("values",)),
    "an empty layer": cut(1, 100),
    "an empty first layer": cut(0, 100),
    "a longer layer": lambda cache: doubled(cache.layers[1]),
    "longer layers": each(doubled),
    "fewer heads": fewer_heads,
    "a masked head": a_masked_head,
    "written in place": written_in_place,
    "another dtype": each(lambda layer: setattr(layer, "keys", layer.keys.double())),
    "a layer reset": lambda cache: cache.layers[1].reset(),
    "reset": lambda cache: cache.reset(),
    "a layer more": lambda cache: cache.layers.append(DynamicLayer()),
    "a filled layer more": lambda cache: cache.layers.append(copy.deepcopy(cache.layers[0])),
    "a layer fewer": lambda cache: cache.layers.__delitem__(-1),
    "layers exchanged": lambda cache: cache.layers.reverse(),
    "with a copy of another layer": with_another_layer,
    "layers in another cache": in_another_cache,
    "a new cache": without_config,
    "cropped": lambda cache: cache.crop(-2),
    "a cropped layer": lambda cache: cache.layers[0].crop(-2),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "a reordered layer": lambda cache: cache.layers[1].reorder_cache(torch.tensor([2, 0, 0])),
    "offloaded and back": each(lambda layer: (layer.offload(), layer.prefetch())),
    "past recorded": lambda cache: cache.activate_past_recording(),
    "past recorded and cropped": recorded_and_cropped,
    "cropped by nothing": lambda cache: cache.crop(0),
    "cropped to a length": lambda cache: cache.crop(3),
    "another cumulative length": cumulative,
    "another window": window,
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_cache(change: str, name: str, machine: str) -> None:
    model = CAUSAL[name].make()
    its = caches(model, CHANGES[change])
    assert_same(caches(accelpatch.patch(model, "exact", verify=False), CHANGES[change]), its)


@pytest.mark.each_value
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("names", [("keys",), ("values",)], ids=["keys-shorter", "values-shorter"])
def test_keys_and_values_of_other_lengths_are_the_modules(names: tuple[str, ...], name: str, machine: str) -> None:
    """Of shorter keys, torch's attention reads what lies behind them, so that no two results need be the same."""
    model = accelpatch.patch(CAUSAL[name].make(), "exact", verify=False)
    cache = begun(model)
    before = steps_of(model)
    cut(1, 2, names)(cache)
    with contextlib.suppress(RuntimeError):
        given(model, cache, 1, 9)
    assert before == steps_of(model) == 2


def steps_of(model: Any) -> int:
    paths = model.accelpatch.report().paths
    return int(paths.get(NATIVE, 0) + paths.get(CAPTURED, 0))


def evicting(place: int, count: int) -> Callable[..., None]:
    """A hook of an attention module that evicts its layer's first tokens after the prompt, as kvpress does."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get(CACHE, kwargs.get(FORMER))
        if module.layer_idx == place and kwargs["hidden_states"].shape[1] > 1:
            cut(place, count)(cache)

    return hook


@pytest.mark.each_value
@pytest.mark.parametrize("name, place", [("llama", 0), ("llama", 1), ("gemma3", 1)])  # layers without a window
@pytest.mark.parametrize("stays", [False, True], ids=["hook-removed", "hook-stays"])
def test_tokens_evicted_by_a_hook(stays: bool, name: str, place: int, machine: str) -> None:
    def run(model: Any) -> list[Any]:
        handle = model.model.layers[place].self_attn.register_forward_hook(evicting(place, 3), with_kwargs=True)
        if stays:
            return caches(model, lambda cache: None)

        def without(cache: Any) -> None:
            handle.remove()

        return caches(model, without)

    model = CAUSAL[name].make()
    its = run(model)
    for module in model.modules():
        module._forward_hooks.clear()
    assert_same(run(accelpatch.patch(model, "exact", verify=False)), its)


@pytest.mark.each_value
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["a shorter layer", "a shorter first layer", "shorter layers", "a masked head"])
def test_generate_goes_on_over_a_cache(change: str, name: str, machine: str) -> None:
    def run(model: Any) -> list[Any]:
        cache = begun(model)
        CHANGES[change](cache)
        ids = torch.cat((full_batch()["input_ids"], torch.tensor([[5, 6, 9]] * 3)), 1)
        given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, CACHE: cache}
        try:
            found: list[Any] = [model.generate(ids, attention_mask=torch.ones_like(ids), **given)]
        except (RuntimeError, ValueError) as error:
            found = [error]
        return [*found, *(one for layer in cache.layers for one in (layer.keys, layer.values))]

    model = CAUSAL[name].make()
    its = run(model)
    assert_same(run(accelpatch.patch(model, "exact", verify=False)), its)
