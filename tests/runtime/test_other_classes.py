"""Classes, methods of generation and instances of others: they run, and the rest stays fast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from torch import Tensor
from transformers.generation.utils import GenerationMixin

import accelpatch
from tests.support.other_code import NEW, assert_alike, scaled, steps
from tests.support.tiny import CAUSAL, full_batch, padded_batch


class Steered(llama.LlamaDecoderLayer):
    """A layer with a switch that is turned on later."""

    steer = 0.0

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) + self.steer


class LongMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.shape[1] > 4 else 1)


class Bounded(llama.LlamaRMSNorm):
    bound = 100.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-self.bound, self.bound)


class Slow(llama.LlamaRotaryEmbedding):
    speed = 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, (position_ids * self.speed).long())


class Same(llama.LlamaDecoderLayer):
    """Its forward is the family's own."""

    def describe(self) -> str:
        return "a layer"


class Hidden(llama.LlamaDecoderLayer):
    """Its forward is the family's own, and calls another child."""

    @property
    def mlp(self) -> Any:
        return self._modules["self_attn"].o_proj


def _layer(model: Any) -> Any:
    return model.model.layers[1]


SUBCLASSES: dict[str, tuple[Callable[[Any], Any], type, str, float]] = {
    "a layer": (_layer, Steered, "steer", 0.5),
    "an MLP": (lambda model: _layer(model).mlp, LongMLP, "unused", 0.0),
    "a norm": (lambda model: _layer(model).post_attention_layernorm, Bounded, "bound", 0.1),
    "the last norm": (lambda model: model.model.norm, Bounded, "bound", 0.1),
    "the rotary embedding": (lambda model: model.model.rotary_emb, Slow, "speed", 0.5),
    "a layer with a property": (_layer, Hidden, "unused", 0.0),
}


@pytest.mark.each_value
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", SUBCLASSES)
def test_subclasses_are_kept_and_their_switches_work(case: str, after: bool, machine: str) -> None:
    find, kind, switch, value = SUBCLASSES[case]
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    if not after:
        find(model).__class__ = kind
    accelpatch.patch(model, "exact")
    find(plain).__class__ = kind
    if after:
        assert_alike(model, CAUSAL["llama"].make(), full_batch())
        find(model).__class__ = kind
    for at in (None, value):
        if at is not None:
            setattr(find(plain), switch, at)
            setattr(find(model), switch, at)
        steps(model)
        for batch in (full_batch(), padded_batch()):
            assert_alike(model, plain, batch)
        if case in ("a layer", "an MLP", "a norm"):
            assert any("modules in layers [1]" in name for name in model.accelpatch.report().paths)
    if not after:
        record = next(one for one in model.accelpatch.report().sites if one.reason and kind.__name__ in one.reason)
        assert record.replacer is None


def test_a_subclass_with_the_familys_own_forward_is_fast(machine: str) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    _layer(model).__class__ = Same
    accelpatch.patch(model, "exact", verify=False)
    assert_alike(model, plain, full_batch())
    assert not any("modules in layers" in name for name in model.accelpatch.report().paths)
    assert steps(model) > 0


class Shifted(llama.LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._update_model_kwargs_for_generation(*args, **kwargs)
        if made.get("position_ids") is not None:
            made["position_ids"] = made["position_ids"] + 3
        return made


class Prepared(llama.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        made = super().prepare_inputs_for_generation(*args, **kwargs)
        made["input_ids"] = made["input_ids"] % 7 + 3
        return made


def _on_the_instance(model: Any) -> None:
    stock = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: (
        made := stock(*args, **kwargs)
    ) | {"input_ids": made["input_ids"] % 7 + 3}  # fmt: skip


def _of_class(cls: type) -> Callable[[Any], None]:
    return lambda model: setattr(model, "__class__", cls)


OF_GENERATION: dict[str, Callable[[Any], None]] = {
    "a subclass that moves positions": _of_class(Shifted),
    "a subclass that changes ids": _of_class(Prepared),
    "on the instance": _on_the_instance,
}


@pytest.mark.parametrize("case", OF_GENERATION)
def test_methods_of_generation_are_called_for_every_step(case: str, machine: str) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    for one in (plain, model):
        OF_GENERATION[case](one)
    accelpatch.patch(model, "exact", verify=False)
    for batch in (full_batch(), padded_batch()):
        assert_alike(model, plain, batch)
    assert any(name.startswith("stock loop: ") for name in model.accelpatch.report().paths)
    assert steps(model) > 0  # each of its calls is a fast one


@pytest.mark.parametrize("when", ["before", "after"])
def test_methods_of_generation_on_their_class(when: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    if when == "after":
        accelpatch.patch(model, "exact", verify=False)
        assert_alike(model, plain, full_batch())
    stock = GenerationMixin._update_model_kwargs_for_generation
    monkeypatch.setattr(
        GenerationMixin, "_update_model_kwargs_for_generation", Shifted._update_model_kwargs_for_generation
    )
    monkeypatch.setattr(
        GenerationMixin, "_update_model_kwargs_for_generation",
        lambda self, *args, **kwargs: (made := stock(self, *args, **kwargs))
        | {name: value + 3 for name, value in made.items() if name == "position_ids" and value is not None},
    )  # fmt: skip
    if when == "before":
        accelpatch.patch(model, "exact", verify=False)
    assert_alike(model, plain, padded_batch())
    assert steps(model) > 0


def test_another_sampling_method_runs(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    model.generate(**full_batch(), max_new_tokens=2)
    monkeypatch.setattr(GenerationMixin, "_sample", lambda self, input_ids, *args, **kwargs: input_ids[:, :1] * 0 + 9)
    assert model.generate(**full_batch(), max_new_tokens=2).unique().tolist() == [9]


def test_a_method_on_an_instance_is_used(machine: str) -> None:
    plain, model = CAUSAL["gemma2"].make(), CAUSAL["gemma2"].make()
    accelpatch.patch(model, "exact", verify=False)
    assert_alike(model, plain, full_batch())
    for one in (plain, model):
        norm = one.model.layers[0].input_layernorm
        norm._norm = functools.partial(lambda norm, x: 0.5 * type(norm)._norm(norm, x), norm)
    assert_alike(model, plain, full_batch())


def test_a_change_within_generate_counts_from_the_next_call(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    accelpatch.patch(model, "exact", verify=False)
    due = plain.generate(**full_batch(), max_new_tokens=NEW, do_sample=False)

    class Patching:
        def put(self, tokens: Tensor) -> None:
            monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))

        def end(self) -> None:
            pass

    steps(model)
    assert (
        model.generate(**full_batch(), max_new_tokens=NEW, do_sample=False, streamer=Patching()).tolist()
        == due.tolist()
    )
    assert steps(model) > 0
    assert_alike(model, plain, full_batch())
    assert steps(model) == 0


def test_what_is_inside_is_called_alone(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    accelpatch.patch(model, "exact", verify=False)
    monkeypatch.setattr(llama.LlamaMLP, "forward", scaled(llama.LlamaMLP.forward, 0.5))
    found, due = (one.model(**full_batch()).last_hidden_state for one in (model, plain))
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
