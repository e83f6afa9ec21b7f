"""Hooks on inner modules of a model with native steps: they are served, and cost their own layer alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.runtime.cpu.test_native_step import STEPPING, by_modules, decode, native_steps, patched
from tests.support.tiny import CAUSAL, full_batch, padded_batch

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")


@pytest.mark.each_value
@pytest.mark.parametrize("place", [0, 1, "all"])
@pytest.mark.parametrize("name", STEPPING)
def test_a_hook_inside_makes_its_layer_alone_run_its_modules(name: str, place: int | str) -> None:
    model, batch, seen = patched(name), padded_batch(), []
    plain = decode(by_modules(copy.deepcopy(model)), batch, 20)
    layers = model.model.layers if place == "all" else [model.model.layers[place]]
    hooks = [layer.self_attn.o_proj.register_forward_hook(lambda *args: seen.append(1)) for layer in layers]
    found = decode(model, batch, 20)
    torch.testing.assert_close(found, plain, rtol=2e-4, atol=2e-4)
    assert len(seen) == 21 * len(layers)
    numbers = list(range(len(layers))) if place == "all" else [place]
    assert model.accelpatch.report().paths[f"{NATIVE}, but modules in layers {numbers}: a hook inside"] == 20
    assert native_steps(model) == 0
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(decode(model, batch, 20), plain, rtol=2e-4, atol=2e-4)
    assert native_steps(model) == 20
    assert len(seen) == 21 * len(layers)


@pytest.mark.each_value
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", STEPPING)
def test_a_layer_that_has_no_native_form_runs_its_module_in_the_same_step(name: str, place: int) -> None:
    model, batch = CAUSAL[name].make(), padded_batch()
    attention: Any = model.model.layers[place].self_attn
    attention.__class__ = type("OwnAttention", (type(attention),), {})
    accelpatch.patch(model, "int8", verify=False)
    found = decode(model, batch, 20)
    torch.testing.assert_close(found, decode(by_modules(copy.deepcopy(model)), batch, 20), rtol=2e-4, atol=2e-4)
    mixed = f"{NATIVE}, but modules in layers [{place}]: its attention is OwnAttention"
    assert model.accelpatch.report().paths[mixed] == 20


def test_neighbours_that_are_watched_hand_their_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(num_hidden_layers=5), "int8", verify=False)
    plain, ranges, part = decode(by_modules(copy.deepcopy(model)), full_batch(), 2), [], DecodeStep.part

    def recorded(step: DecodeStep, *args: Any) -> Any:
        ranges.append(args[4])
        return part(step, *args)

    monkeypatch.setattr(DecodeStep, "part", recorded)
    for place in (0, 1, 3):
        model.model.layers[place].register_forward_hook(lambda *args: None)
    torch.testing.assert_close(decode(model, full_batch(), 2), plain, rtol=2e-4, atol=2e-4)
    assert ranges == [range(0), range(2, 3), range(4, 5)] * 2


def test_what_a_hook_gives_back_is_used() -> None:
    model, batch = patched("llama"), full_batch()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 3)
    found = decode(model, batch, 5)
    assert native_steps(model) == 0
    torch.testing.assert_close(found, decode(by_modules(model), batch, 5), rtol=2e-4, atol=2e-4)


def test_a_hook_outside_of_the_layers_has_the_modules_run() -> None:
    model, seen = patched("llama"), []
    model.model.norm.register_forward_hook(lambda *args: seen.append(1))
    model.generate(**full_batch(), max_new_tokens=6, do_sample=False)
    assert len(seen) == 6
    assert model.accelpatch.report().paths["modules: a hook outside of the layers"] == 5


def test_a_hook_that_fails_leaves_the_cache_as_it_was() -> None:
    model, batch = patched("llama"), full_batch()
    due = decode(model, batch, 3)
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
        model(input_ids=torch.full((3, 1), 3), past_key_values=cache)
        length = cache.get_seq_length()

        def fail(*args: Any) -> None:
            raise RuntimeError("watched too closely")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="watched too closely"):
            model(input_ids=torch.full((3, 1), 10), past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == length
        again = model(input_ids=torch.full((3, 1), 10), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(again, due[:, 1], rtol=1e-4, atol=1e-4)


def test_a_forward_of_the_users_own_is_used() -> None:
    model: Any = CAUSAL["llama"].make()

    class Louder(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = -outputs.logits
            return outputs

    model.__class__ = Louder
    due = copy.deepcopy(model).generate(**full_batch(), max_new_tokens=5, do_sample=False)
    accelpatch.patch(model, "exact")
    assert torch.equal(model.generate(**full_batch(), max_new_tokens=5, do_sample=False), due)
    assert native_steps(model) == 0
