"""Single calls by fused layers: logits, cache and loss of the modules, for every way in which a program calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import accelpatch
from accelpatch.runtime.graphs.fused_forward import FORWARD
from tests.fusion.test_fused_layer import RECIPES, _as_on_a_gpu, patched, paths  # noqa: F401
from tests.support.spread import spread
from tests.support.steps import stock
from tests.support.tiny import CAUSAL, full_batch, padded_batch

NAMES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
CAPPED = ("gemma2", "gemma3", "glm", "stablelm", "phi")  # capped scores, other norms, or a partial rotary embedding


def more(batch: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The arguments of a call that goes on with so many tokens."""
    mask = batch["attention_mask"]
    ids = torch.arange(7, 7 + count).expand(len(mask), -1)
    return {"input_ids": ids, "attention_mask": torch.cat([mask, mask.new_ones(ids.shape)], 1)}


def _continued(model: Any, batch: dict[str, Tensor]) -> tuple[list[Tensor], Any]:
    found = []
    cache = model(**batch).past_key_values
    for count in (1, 3, 1, 9):
        batch = more(batch, count)
        outputs = model(**batch, past_key_values=cache)
        found.append(outputs.logits)
    return found, cache


def _cached(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _streams(model: Any) -> list[Tensor]:
    shown = padded_batch()["attention_mask"].bool()  # where nothing is seen, eager attention gives other numbers
    return [one[shown] for one in model(**padded_batch(), output_hidden_states=True).hidden_states]


def _scored(model: Any) -> Any:
    batch = full_batch()
    outputs = model(**batch, labels=batch["input_ids"])
    return [outputs.loss, outputs.logits]


def _positioned(model: Any) -> Any:
    batch = padded_batch()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model(**batch, position_ids=positions).logits[batch["attention_mask"].bool()]


def _hidden_on_the_right(model: Any) -> Any:
    batch = full_batch()
    batch["attention_mask"][1, 6:] = 0
    outputs = model(**batch, labels=batch["input_ids"])
    return [outputs.logits, outputs.loss]


# what a program calls -> what comes back of it
CALLS: dict[str, Callable[[Any], Any]] = {
    "ids": lambda model: model(full_batch()["input_ids"]).logits,
    "named": lambda model: model(input_ids=full_batch()["input_ids"], use_cache=False, return_dict=True).logits,
    "one": lambda model: model(full_batch()["input_ids"][:1, :1]).logits,
    "mask": lambda model: model(**full_batch()).logits,
    "padded": lambda model: model(**padded_batch()).logits,
    "right": _hidden_on_the_right,
    "positions": _positioned,
    "continued": lambda model: _continued(model, padded_batch())[0],
    "continued-cache": lambda model: _cached(_continued(model, full_batch())[1]),
    "kept": lambda model: model(**full_batch(), logits_to_keep=2).logits,
    "picked": lambda model: model(**full_batch(), logits_to_keep=torch.tensor([3, 0])).logits,
    "labels": _scored,
    "hidden": _streams,
    "cache": lambda model: _cached(model(**full_batch()).past_key_values),
    "beams": lambda model: model.generate(**padded_batch(), num_beams=3, max_new_tokens=6).float(),
}


def assert_close(found: Any, due: Any) -> None:
    pairs = zip(found, due, strict=True) if isinstance(due, list) else [(found, due)]
    for mine, its in pairs:
        assert mine.shape == its.shape
        assert mine.dtype == its.dtype
        assert (mine - its).norm() <= 1e-5 * its.norm()


@pytest.mark.each_value
@spread("name, call, recipe", NAMES, [*CALLS], [*RECIPES])
@torch.no_grad()
def test_what_the_modules_give(name: str, call: str, recipe: str) -> None:
    model = patched(name, recipe)
    due = CALLS[call](stock(model))
    for _ in range(2):  # a prompt that comes again is one graph
        assert_close(CALLS[call](model), due)
    assert paths(model).get(FORWARD, 0) >= 2


@pytest.mark.parametrize("call", ["ids", "positions", "right", "continued", "cache"])
@pytest.mark.parametrize("name", CAPPED)
@torch.no_grad()
def test_attention_of_gemmas_kind(name: str, call: str) -> None:
    model = patched(name)
    assert_close(CALLS[call](model), CALLS[call](stock(model)))
    assert paths(model)[FORWARD] >= 1


@pytest.mark.each_value
@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize("call", ["ids", "right", "continued", "hidden"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_watched_layer_alone_runs_its_modules(name: str, call: str, eager: bool) -> None:
    model = CAUSAL[name].make()
    if eager:
        model.set_attn_implementation("eager")
    accelpatch.patch(model, "exact", verify=False)
    due = CALLS[call](stock(model))
    seen: list[Any] = []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    assert_close(CALLS[call](model), due)
    assert seen
    assert f"{FORWARD}, but modules in layers [1]: a hook inside" in paths(model)


# What only the modules give, or what the fused layers do not know.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "attentions": lambda model: model(**full_batch(), output_attentions=True).logits,
    "tuple": lambda model: model(**full_batch(), return_dict=False)[0],
    "embeds": lambda model: model(inputs_embeds=model.model.embed_tokens(full_batch()["input_ids"])).logits,
    "static": lambda model: model.generate(**full_batch(), num_beams=2, cache_implementation="static"),
    "packed": lambda model: (
        model(full_batch()["input_ids"], position_ids=torch.arange(9)[None] % 4, use_cache=False).logits
    ),
    "unused-cache": lambda model: (
        model(full_batch()["input_ids"], past_key_values=DynamicCache(), use_cache=False).past_key_values.layers[1].keys
    ),
    "mask-4d": lambda model: model(full_batch()["input_ids"], torch.ones(3, 1, 9, 9).tril().bool()).logits,
}


@pytest.mark.parametrize("call", OTHERS)
@torch.no_grad()
def test_what_is_left_to_the_modules(call: str) -> None:
    model = patched()
    due = OTHERS[call](stock(model))
    assert torch.equal(OTHERS[call](model), due)
    assert FORWARD not in paths(model)


@torch.no_grad()
def test_what_was_changed_is_seen() -> None:
    model = patched()
    CALLS["ids"](model)
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    model.model.layers[1].self_attn.o_proj.weight.data.mul_(2)
    model.model.norm.weight.data.mul_(3)
    assert_close(CALLS["ids"](model), CALLS["ids"](stock(model)))


def test_it_steps_aside_while_a_gradient_is_wanted_and_comes_back() -> None:
    model = patched()
    outputs = model(**full_batch(), labels=full_batch()["input_ids"])
    assert FORWARD not in paths(model)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model(**full_batch())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not model(**full_batch()).logits.requires_grad
    assert paths(model)[FORWARD] == 2


@torch.no_grad()
def test_hooks_outside_of_the_layers_and_forwards_of_the_users_own() -> None:
    model, seen = patched(), []
    handle = model.model.norm.register_forward_hook(lambda *args: seen.append(1))
    due = CALLS["ids"](model)
    assert seen == [1]
    handle.remove()
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    assert_close(CALLS["ids"](model), 2 * due)
    assert FORWARD not in paths(model)


@torch.no_grad()
def test_replicas_of_data_parallel_run_their_own_modules() -> None:
    model = patched()
    due = CALLS["ids"](model)
    replica = model._replicate_for_data_parallel()
    assert_close(CALLS["ids"](replica), due)
    assert paths(model) == {FORWARD: 1}


def looking_ahead(model: Any) -> None:
    model.config.is_causal = False


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 1


def swapped_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


@pytest.mark.parametrize("change", [looking_ahead, fewer_layers, swapped_layers])
@torch.no_grad()
def test_models_that_are_changed_into_others(change: Callable[[Any], None]) -> None:
    model = patched()
    CALLS["ids"](model)
    count = paths(model)[FORWARD]
    change(model)
    assert torch.equal(CALLS["ids"](model), CALLS["ids"](stock(model)))
    assert paths(model)[FORWARD] == count


class Halved(LlamaForCausalLM):
    """A user's own model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits / 2
        return outputs


@torch.no_grad()
def test_a_forward_of_a_users_own_class() -> None:
    plain = CAUSAL["llama"].make()
    own = Halved(plain.config).eval()
    own.load_state_dict(plain.state_dict())
    due = CALLS["ids"](own)
    accelpatch.patch(own, "exact", verify=False)
    assert_close(CALLS["ids"](own), due)
    assert torch.equal(own.generate(**full_batch(), max_new_tokens=4), plain.generate(**full_batch(), max_new_tokens=4))
    assert FORWARD not in paths(own)


def test_gradients_go_to_what_comes_in_from_outside() -> None:
    model = patched().requires_grad_(False)
    ids = full_batch()["input_ids"]
    cache = DynamicCache()
    held = [torch.randn(3, 2, 2, 16, requires_grad=True) for _ in range(4)]
    for place in range(2):
        cache.update(*held[2 * place : 2 * place + 2], place)
    model(ids, past_key_values=cache).logits.sum().backward()
    assert all(bool(one.grad.any()) for one in held)  # type: ignore[union-attr]
    vector = torch.zeros(64, requires_grad=True)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + vector)
    model(ids).logits.sum().backward()
    assert bool(vector.grad.any())  # type: ignore[union-attr]


def test_a_call_of_another_thread_while_generate_runs() -> None:
    """A streamer that waits for it would wait for ever if the call waited for generate()."""
    model, found = patched(), []
    due = CALLS["ids"](model)

    class Asking(BaseStreamer):
        def put(self, value: Tensor) -> None:
            thread = threading.Thread(target=lambda: found.append(CALLS["ids"](model)))
            thread.start()
            thread.join(20)
            assert not thread.is_alive()

        def end(self) -> None:
            pass

    model.generate(input_ids=full_batch()["input_ids"][:1], max_new_tokens=3, streamer=Asking())
    assert len(found) == 4
    assert all(torch.allclose(one, due, atol=1e-4) for one in found)


@torch.no_grad()
def test_traces_are_made_of_the_modules() -> None:
    model = patched().requires_grad_(False)
    ids = full_batch()["input_ids"]
    traced = torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, (ids,), check_trace=False)
    assert FORWARD not in paths(model)
    torch.testing.assert_close(traced(ids), model(ids).logits, rtol=1e-4, atol=1e-4)
