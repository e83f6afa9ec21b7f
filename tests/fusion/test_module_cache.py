"""Modules that ask the cache: they find transformers' interface, and the numbers that they would find unpatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

import accelpatch
from accelpatch.fusion.cache_name import CACHE, FORMER
from tests.runtime.conftest import machine  # noqa: F401
from tests.support.tiny import CAUSAL, full_batch, padded_batch

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
NAMES = ("llama", "mistral", "gemma2", "gpt2", "phi")
Seen = list[tuple[Any, ...]]


def cache_in(kwargs: dict[str, Any]) -> Any:
    return next(kwargs[name] for name in (CACHE, FORMER, "layer_past") if kwargs.get(name) is not None)


def asked(cache: Any, place: int, others: bool = True) -> tuple[Any, ...]:
    """What an attention asks, as numbers; others: of the layers before and after it too."""
    assert isinstance(cache, Cache)
    assert len(cache) == len(cache.layers) == 2
    assert len(cache.get_mask_sizes(1, place)) == 2
    assert len(cache.is_sliding) == 2
    held = cache.layers[place]
    length = int(cache.get_seq_length(place))
    assert held.get_seq_length() == length
    assert length == 0 or held.values.shape == held.keys.shape
    assert isinstance(cache.is_compileable, bool)
    return (place, length, *(int(cache.get_seq_length(other)) for other in range(2) if others))


def hooked(model: Any, layer: int | None = None) -> Seen:
    """Hooks on attention modules that ask, before and after."""
    seen: Seen = []
    for place, one in enumerate(attentions(model)):
        if layer in (None, place):
            one.register_forward_pre_hook(
                lambda module, args, kwargs, at=place: seen.append(("before", *asked(cache_in(kwargs), at))),
                with_kwargs=True,
            )
            one.register_forward_hook(
                lambda module, args, kwargs, out, at=place: seen.append(("after", *asked(cache_in(kwargs), at))),
                with_kwargs=True,
            )
    return seen


def attentions(model: Any) -> list[nn.Module]:
    return [one for name, one in model.named_modules() if name.endswith(("self_attn", ".attn"))]


def subclassed(model: Any, layer: int | None = None) -> Seen:
    """Attention modules whose own code asks."""
    seen: Seen = []
    for place, one in enumerate(attentions(model)):
        if layer in (None, place):
            one.__class__ = _asking(type(one), place, seen)
    return seen


def _asking(cls: Any, place: int, seen: Seen) -> Any:
    class Asking(cls):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(("before", *asked(cache_in(kwargs), place)))
            made = super().forward(*args, **kwargs)
            seen.append(("after", *asked(cache_in(kwargs), place)))
            return made

    return Asking


WAYS: dict[str, Callable[..., Seen]] = {"hooks": hooked, "a subclass": subclassed}


@pytest.mark.each_value
@pytest.mark.parametrize("layer", [None, 1], ids=["all layers", "one layer"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_generate(name: str, way: str, layer: int | None, machine: str) -> None:  # noqa: F811
    """With the checks of the patch, which run prompts and steps of their own."""
    for batch in (full_batch(), padded_batch()):
        stock, model = CAUSAL[name].make(), CAUSAL[name].make()
        due, found = WAYS[way](stock, layer), WAYS[way](model, layer)
        accelpatch.patch(model, "exact", inputs=[batch])
        found.clear()
        for _ in range(2):
            due.clear()
            assert torch.equal(stock.generate(**batch, **OPTIONS), model.generate(**batch, **OPTIONS))
            assert due
            if machine == "cpu":
                assert found[-len(due) :] == due
            else:  # one token that learns the cache's form, warm-ups, and a step that runs ahead
                assert set(due) <= set(found)


def _steps(seen: Seen) -> Seen:
    """What was seen, without what a capture and its warm-ups see again."""
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4", "flash"])
@torch.no_grad()
def test_recipes_and_calls_that_come_again(recipe: str, way: str, machine: str) -> None:  # noqa: F811
    """On a GPU the third call is a graph, which keeps keys and values itself."""
    model = CAUSAL["llama"].make()
    seen = WAYS[way](model, 1)
    accelpatch.patch(model, recipe, inputs=[full_batch()])
    length = full_batch()["input_ids"].shape[1]
    for _ in range(4):
        seen.clear()
        outputs: Any = model(**full_batch(), use_cache=True)
        assert _steps(seen) in ([], [("before", 1, 0, length, 0), ("after", 1, length, length, length)])
        past = getattr(outputs, CACHE)
        seen.clear()
        model(full_batch()["input_ids"][:, :1], use_cache=True, **{CACHE: past})
        assert _steps(seen)[-1] == ("after", 1, length + 1, length + 1, length + 1)
        assert past.get_seq_length() == length + 1


@torch.no_grad()
def test_positions_that_an_attention_takes_from_the_cache(machine: str) -> None:  # noqa: F811
    """As attention modules of older models do."""

    def model() -> Any:
        made: Any = CAUSAL["llama"].make()
        for place, one in enumerate(attentions(made)):
            one.__class__ = _scaling(type(one), place)
        return made

    stock, patched = model(), accelpatch.patch(model(), "exact", inputs=[full_batch()])
    assert torch.equal(stock.generate(**full_batch(), **OPTIONS), patched.generate(**full_batch(), **OPTIONS))


def _scaling(cls: Any, place: int) -> Any:
    class Scaling(cls):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            past = cache_in(kwargs).get_seq_length(place)
            made, weights = super().forward(hidden_states, *args, **kwargs)
            total = cache_in(kwargs).get_seq_length(place)
            return made * (1 + past) + total, weights

    return Scaling
