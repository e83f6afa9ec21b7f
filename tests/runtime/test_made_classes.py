"""What others put into the classes that patch() makes, or derive from them: it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama

import accelpatch
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.replacement import adopt
from tests.support.other_code import assert_alike, patched, scaled, steps
from tests.support.tiny import CAUSAL, full_batch

MADE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an MLP": (lambda model: model.model.layers[0].mlp, "forward"),
    "a norm": (lambda model: model.model.norm, "forward"),
    "a layer": (lambda model: model.model.layers[0], "forward"),
    "the decoder": (lambda model: model.model, "forward"),
    "the model": (lambda model: model, "forward"),
    "its inputs": (lambda model: model, "prepare_inputs_for_generation"),
}


def _shorter(prepare: Any) -> Any:
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(self, *args, **kwargs)
        return {**made, "position_ids": made["position_ids"] + 2}

    return other


@pytest.mark.each_value
@pytest.mark.parametrize("derived", [False, True], ids=["set", "derived"])
@pytest.mark.parametrize("case", MADE)
def test_what_others_put_into_a_class_that_patch_made_runs(
    case: str, derived: bool, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = patched()
    assert steps(model) > 0
    find, name = MADE[case]
    wrap = _shorter if name.startswith("prepare") else functools.partial(scaled, factor=0.75)
    for one in (plain, model):
        kind = type(find(one))
        if not derived and one is model:
            monkeypatch.setattr(kind, name, wrap(getattr(kind, name)))
            continue
        other = type("Derived", (kind,), {name: wrap(getattr(kind, name))})
        for module in [find(one)] if derived else [each for each in one.modules() if type(each) is kind]:
            module.__class__ = other
    found, due = (torch.stack(one.generate(
        **full_batch(), max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    ).logits) for one in (model, plain))  # fmt: skip
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    if not derived:
        assert_alike(model, CAUSAL["llama"].make(), full_batch())
        assert steps(model) > 0


def test_a_class_that_the_user_gave_a_patched_model_stays_when_it_is_unpatched() -> None:
    _, model = patched()
    model.__class__ = type("Mine", (llama.LlamaForCausalLM,), {})
    accelpatch.unpatch(model)
    assert type(model).__name__ == "Mine"


class HalfMLP(GatedMLP):
    """A user's own replacement, derived from one of this package."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


def test_a_replacement_derived_from_one_of_this_package_runs(machine: str) -> None:
    plain, model = patched()
    for layer in model.model.layers:
        made = adopt(HalfMLP, layer.mlp)
        made.activation, made.fused_gate_up, made.skips = "silu", False, ()
        layer.mlp = made
    for layer in plain.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: 0.5 * output)
    assert_alike(model, plain, full_batch())
