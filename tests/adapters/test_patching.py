"""Adapters and patches in either order: the same replacements, the same numbers, and the way back."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.errors import PatchError
from tests.support.lora import RECIPES, adapted, both_orders, peft
from tests.support.simulated import simulated
from tests.support.steps import inner
from tests.support.tiny import CAUSAL, padded_batch

FAMILIES = ("llama", "gemma3", "phi3", "gpt2", "opt", "qwen3_moe")
ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    batch = padded_batch()
    found: Tensor = model(**batch).logits[batch["attention_mask"].bool()]
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_either_order_gives_the_same_replacements_and_numbers(name: str, recipe: str) -> None:
    around = ATTENTION if name == "qwen3_moe" else {}  # PEFT's adapters of experts: below
    before, after = both_orders(name, recipe, **around)
    taken = [
        Counter((site.replacer, site.role) for site in inner(one).accelpatch.report().sites if site.replacer)
        for one in (before, after)
    ]
    assert taken[0] == taken[1]
    assert torch.equal(logits(before), logits(after))
    plan = accelpatch.plan(CAUSAL[name].make(), RECIPES[recipe])
    due = logits(adapted(simulated(CAUSAL[name].make(), plan, torch.float32), **around))
    torch.testing.assert_close(logits(before), due, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(before), logits(inner(both_orders(name, recipe, seed=2, **around)[0])), atol=0.1)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_experts_with_adapters_stay_and_the_plan_says_why(recipe: str) -> None:
    model = adapted(CAUSAL["qwen3_moe"].make(), **EXPERTS)
    due = logits(model)
    plan = accelpatch.plan(model, RECIPES[recipe])
    reasons = {site.path: site.reason for site in plan.report().sites if site.role == "experts"}
    assert reasons
    for path, reason in reasons.items():
        assert path.endswith("experts.base_layer.base_layer")
        assert reason == "an adapter changes down_proj and gate_up_proj each time it runs"
    accelpatch.patch(model, RECIPES[recipe])
    rounded = adapted(CAUSAL["qwen3_moe"].make(), **EXPERTS)
    rounded.base_model.model = simulated(inner(rounded), plan, torch.float32)
    torch.testing.assert_close(logits(model), logits(rounded), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(accelpatch.unpatch(model)), due)


def test_a_linear_layer_whose_parameter_has_an_adapter_stays() -> None:
    model = adapted(CAUSAL["llama"].make(), target_modules=[], target_parameters=["q_proj.weight"])
    due = logits(model)
    accelpatch.patch(model, "int8")
    sites = {site.role: site for site in inner(model).accelpatch.report().sites}
    assert sites["q_proj"].reason == "an adapter changes weight each time it runs"
    assert (logits(model) - due).norm() / due.norm() < 0.2


def test_the_plan_names_the_weights_of_adapters_and_leaves_them() -> None:
    plan = accelpatch.plan(adapted(CAUSAL["llama"].make()), "int8")
    sites = {site.path: site for site in plan.report().sites}
    q = sites["model.layers.0.self_attn.q_proj.base_layer"]
    assert (q.role, q.replacer) == ("q_proj", "int8_weight_only")
    low = sites["model.layers.0.self_attn.q_proj.lora_A.default"]
    assert (low.role, low.replacer) == ("other", None)
    assert "model.layers.0.self_attn.q_proj" not in sites


def test_verification_runs_the_adapters() -> None:
    model = adapted(CAUSAL["llama"].make())
    accelpatch.patch(model, "int8")
    report = inner(model).accelpatch.report()
    assert report.verification.failures == []
    assert [site.path for site in report.sites if site.unverified] == []


def snapshot(model: Any) -> dict[str, Any]:
    return {name: (id(module), type(module)) for name, module in model.named_modules(remove_duplicate=False)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt2"])
def test_the_way_back_of_an_adapted_model(name: str, recipe: str) -> None:
    model = adapted(CAUSAL[name].make())
    before, due = snapshot(model), logits(model)
    accelpatch.patch(model, RECIPES[recipe], verify=False)
    assert snapshot(model) != before
    assert accelpatch.unpatch(model) is model
    assert snapshot(model) == before
    assert torch.equal(logits(model), due)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt2"])
def test_adapters_that_came_later_stay_after_unpatch(name: str, recipe: str) -> None:
    base = CAUSAL[name].make()
    originals = {type(module).__name__ for module in base.modules()}
    model = adapted(accelpatch.patch(base, RECIPES[recipe], verify=False))
    accelpatch.unpatch(model)
    due = adapted(CAUSAL[name].make())
    assert torch.equal(logits(model), logits(due))
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in due.named_modules()]
    assert {type(module).__name__ for module in model.unload().modules()} == originals


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("order", [0, 1], ids=["patched-first", "adapted-first"])
def test_adapters_that_go_leave_a_patched_model(order: int, recipe: str) -> None:
    model = both_orders("llama", recipe)[order]
    alone = model.unload()
    plan = accelpatch.plan(CAUSAL["llama"].make(), RECIPES[recipe])
    torch.testing.assert_close(
        logits(alone), logits(simulated(CAUSAL["llama"].make(), plan, torch.float32)), rtol=1e-4, atol=1e-4
    )
    accelpatch.unpatch(alone)
    fresh = CAUSAL["llama"].make()
    assert torch.equal(logits(alone), logits(fresh))
    assert [(n, type(m)) for n, m in alone.named_modules()] == [(n, type(m)) for n, m in fresh.named_modules()]


def test_a_patch_that_fails_leaves_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(CAUSAL["llama"].make())
    before, due = snapshot(model), logits(model)

    def broken(*given: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("accelpatch.patching.apply.release_originals", broken)
    with pytest.raises(RuntimeError, match="no"):
        accelpatch.patch(model, "int8", verify=False)
    assert snapshot(model) == before
    assert torch.equal(logits(model), due)


def test_a_peft_model_is_patched_inside() -> None:
    model = adapted(CAUSAL["llama"].make())
    assert accelpatch.patch(model, "exact", verify=False) is model
    assert isinstance(model, peft.PeftModel)
    assert model.accelpatch is inner(model).accelpatch
    with pytest.raises(PatchError, match="already patched"):
        accelpatch.patch(model)
    other = copy.deepcopy(model)
    accelpatch.unpatch(model)
    with pytest.raises(PatchError, match="not patched"):
        accelpatch.unpatch(inner(model))
    accelpatch.unpatch(other)
