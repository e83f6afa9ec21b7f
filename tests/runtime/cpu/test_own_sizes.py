"""Native steps of models whose layers, embedding and head have sizes of their own; what has no native form runs as
modules, with its reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.runtime.cpu.test_native_step import by_modules, decode, pytestmark  # noqa: F401
from tests.support.resized import OTHERS, SIZES, Change
from tests.support.tiny import CAUSAL, padded_batch

STEPS = 6
LINEAR = "Sequential is not a linear layer or embedding of accelpatch"
orders = pytest.mark.parametrize("first", [True, False], ids=["before-the-patch", "after-it"])
recipes = pytest.mark.parametrize("recipe", ["int8", "exact"])
FORMAT = {"int8": 0.1, "exact": 1e-4}  # how far each format is off at most


def changed(change: Change, recipe: str, *, first: bool, name: str = "qwen3") -> tuple[Any, Any]:
    """A patched model that was changed before or after the patch, and the same unpatched."""
    model, plain = CAUSAL[name].make(), CAUSAL[name].make()
    change(plain)
    if first:
        change(model)
    accelpatch.patch(model, recipe)
    if not first:
        change(model)
    return model, plain


@torch.no_grad()
def held(model: Any, plain: Any, recipe: str) -> list[str]:
    """How the model steps natively. It computes what its modules do, and is bit for bit the plain one when it is
    unpatched."""
    batch = padded_batch()
    found = decode(model, batch, STEPS)
    ways = {way: count for way, count in model.accelpatch.report().paths.items() if way.startswith(NATIVE)}
    assert sum(ways.values()) == STEPS
    torch.testing.assert_close(found, decode(by_modules(copy.deepcopy(model)), batch, STEPS), rtol=2e-4, atol=2e-4)
    due = decode(plain, batch, STEPS)
    assert found.shape == due.shape
    assert (found - due).norm() < FORMAT[recipe] * due.norm()
    accelpatch.unpatch(model)
    assert torch.equal(decode(model, batch, STEPS), due)
    return list(ways)


@pytest.mark.each_value
@recipes
@orders
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_its_own(name: str, first: bool, recipe: str) -> None:
    assert held(*changed(SIZES[name], recipe, first=first), recipe) == [NATIVE]


@orders
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen2", "mistral"])
def test_sizes_of_other_families(name: str, first: bool) -> None:
    def all_of_them(model: Any) -> None:
        for size in ("pruned-heads", "pruned-mlp", "larger-head"):
            SIZES[size](model)

    assert held(*changed(all_of_them, "int8", first=first, name=name), "int8") == [NATIVE]


@pytest.mark.each_value
@recipes
@orders
@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_with_another_module_runs_its_modules(name: str, first: bool, recipe: str) -> None:
    place, change = OTHERS[name]
    model, plain = changed(change, recipe, first=first)
    (how,) = held(model, plain, recipe)
    assert how.startswith(f"{NATIVE}, but modules in layers [{place}]: ")


@pytest.mark.parametrize("name", OTHERS)
def test_the_plan_says_which_layer_runs_its_modules(name: str) -> None:
    (place, change), model = OTHERS[name], CAUSAL["qwen3"].make()
    change(model)
    plan = accelpatch.plan(model, "int8")
    fused = {site.path: site.fused for site in plan.report().sites if site.role == "layer"}
    assert fused == {f"model.layers.{at}": at != place for at in (0, 1)}
    (reason,) = [site.by_modules for site in plan.report().sites if site.fused is False]
    assert reason is not None
    assert reason.endswith(f"_proj: {LINEAR}")
    assert f"; model.layers.{place}: {reason}" in str(plan)
    assert "1 of 2 layers fused" in str(plan)
    assert "None" not in str(plan)


@pytest.mark.parametrize("name", SIZES)
def test_the_plan_keeps_native_steps_for_sizes_of_its_own(name: str) -> None:
    model = CAUSAL["qwen3"].make()
    SIZES[name](model)
    layers = [site for site in accelpatch.plan(model, "int8").report().sites if site.role == "layer"]
    assert [site.kernel for site in layers] == [NATIVE, NATIVE]


def _renormalised(model: Any) -> None:
    """An embedding that writes into its table while it runs; its rows are longer than it lets them be."""
    SIZES["larger-embedding"](model)
    model.get_input_embeddings().max_norm = 0.5


@recipes
@orders
def test_an_embedding_that_writes_its_table_runs_as_a_module(first: bool, recipe: str) -> None:
    model, plain = changed(_renormalised, recipe, first=first)
    found, due = decode(model, padded_batch(), STEPS), decode(plain, padded_batch(), STEPS)
    assert (found - due).norm() < FORMAT[recipe] * due.norm()
    reason = "modules: it renormalises the rows that it reads in place (max_norm=0.5)"
    assert model.accelpatch.report().paths[reason] == STEPS


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_a_packed_embedding_that_writes_its_table_since_the_patch(name: str) -> None:
    model, plain = CAUSAL[name].make(), CAUSAL[name].make()
    accelpatch.patch(model, "int8")
    assert type(model.get_input_embeddings()).__name__.startswith("Int8")
    for one in (model, plain):
        one.get_input_embeddings().max_norm = 0.5
    found, due = decode(model, padded_batch(), STEPS), decode(plain, padded_batch(), STEPS)
    assert (found - due).norm() < FORMAT["int8"] * due.norm()
