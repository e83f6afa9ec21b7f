"""What a call gives at padding: what the unpatched model gives there, also where a token sees no key at all.

The logits of the last padding before a text are those of its first token, which a loss counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.fusion import cache_call
from accelpatch.runtime.graphs.fused_forward import FORWARD
from tests.fusion.test_fused_layer import _as_on_a_gpu  # noqa: F401
from tests.support.tiny import CAUSAL, padded_batch

NAMES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "phi")
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "left": lambda mask: mask,
    "right": lambda mask: mask.flip(1),
    "right, by more than a window": lambda mask: (torch.arange(mask.shape[1]) < 2).long().expand_as(mask),
    "both ends": lambda mask: mask * mask.flip(1),
    "a hole": lambda mask: mask * (torch.arange(mask.shape[1]) != 5),
    "a row of padding": lambda mask: mask * (torch.arange(len(mask)) > 0)[:, None],
}


def pair(name: str, implementation: str, recipe: str) -> tuple[Any, Any]:
    plain, model = CAUSAL[name].make(), CAUSAL[name].make()
    for one in (plain, model):
        one.set_attn_implementation(implementation)
    return plain, accelpatch.patch(model, recipe, verify=False)


def implementations(name: str) -> tuple[str, ...]:
    return ("eager",) if name == "gemma2" else ("eager", "sdpa")


@pytest.mark.each_value
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "implementation"), [(name, one) for name in NAMES for one in implementations(name)]
)  # fmt: skip
@torch.no_grad()
def test_every_place_of_a_padded_batch(name: str, implementation: str, mask: str) -> None:
    plain, model = pair(name, implementation, "exact")
    given: dict[str, Any] = padded_batch()
    given["attention_mask"] = MASKS[mask](given["attention_mask"])
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    found, due = (one(**given, output_hidden_states=True) for one in (model, plain))
    assert model.accelpatch.report().paths[FORWARD] == 1
    torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, due.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.hidden_states, due.hidden_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before, after", [("sdpa", "eager"), ("eager", "sdpa")])
@torch.no_grad()
def test_another_implementation_after_the_patch(before: str, after: str) -> None:
    plain, model = pair("llama", before, "flash")
    for one in (plain, model):
        one.set_attn_implementation(after)
    given = padded_batch()
    torch.testing.assert_close(model(**given).logits, plain(**given).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [1, 3, "places"])
@torch.no_grad()
def test_places_that_the_caller_keeps(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by transformers' functions is for those calls alone that return what padding gets."""
    plain, model = pair("llama", "sdpa", "exact")
    given = padded_batch() | {"logits_to_keep": torch.tensor([0, 4]) if kept == "places" else kept}
    calls: list[int] = []

    stock = cache_call.attend_by_torch
    monkeypatch.setattr(
        cache_call, "attend_by_torch", lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    )
    torch.testing.assert_close(model(**given).logits, plain(**given).logits, rtol=1e-4, atol=1e-4)
    assert bool(calls) == (kept == "places")


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_a_padded_batch_that_continues_a_cache(name: str) -> None:
    plain, model = pair(name, "sdpa", "exact")
    first = padded_batch()
    more = {
        "input_ids": first["input_ids"],
        "attention_mask": torch.cat((first["attention_mask"], first["attention_mask"]), 1),
    }
    made = []
    for one in (model, plain):
        cache = one(**first).past_key_values
        made.append(one(**more, past_key_values=cache).logits)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
