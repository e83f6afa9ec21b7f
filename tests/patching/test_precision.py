"""Replacements that change no format are held to the precision of the model's dtype, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import RecipeError, VerifyError
from accelpatch.patching.verify import UNITS, units_apart
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.schema import Units
from accelpatch.replacers.norm import RMSNormReplacer
from tests.support.tiny import CAUSAL, snapshot

STRICT = "name: t\ndescription: t\nextends: exact\nverify: {on_failure: error}\n"
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_wrong_channel_of_thousands_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by 5%: its relative RMSE is 8e-4, less than a rounding of bfloat16."""
    model = CAUSAL["llama"].make(dtype, hidden_size=4096, intermediate_size=64, num_hidden_layers=1)
    before, build = snapshot(model), RMSNormReplacer.build

    def off(self: Any, site: Any, choice: Any, stats: Any = None) -> nn.Module:
        new = build(self, site, choice, stats)
        if site.path == "model.norm":
            weight = new.weight.detach().clone()
            weight[1234] *= 1.05
            new.weight = nn.Parameter(weight)
        return new

    monkeypatch.setattr(RMSNormReplacer, "build", off)
    with pytest.raises(VerifyError, match=r"model\.norm: it is .* units of its dtype's precision from the original"):
        accelpatch.patch(model, recipes.parse(STRICT))
    assert snapshot(model) == before
    accelpatch.patch(model, "exact")
    assert [one.partition(":")[0] for one in model.accelpatch.report().verification.failures] == ["model.norm"]


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "phi3", "mixtral"])
def test_no_site_is_lost_by_roundings(name: str, dtype: torch.dtype, recipe: str) -> None:
    model = accelpatch.patch(CAUSAL[name].make(dtype), recipe)
    assert model.accelpatch.report().verification.failures == []


@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_a_neighbour_is_two_units_away_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    due = (torch.rand(64, 4096, dtype=torch.float64) + 0.1).to(dtype)
    assert units_apart([(due, due)]) == 0
    assert units_apart([(due, due.roll(1, 0))]) > 8
    due[3, 7] = 1.0
    far = due.clone()
    far[3, 7] = (due[3, 7].double() + 4.5 * UNITS[dtype]).to(dtype)
    assert 4 <= units_apart([(far, due)]) <= 6
    near = due.clone()
    near[3, 7] = 1 + torch.finfo(dtype).eps
    assert units_apart([(near, due)]) == pytest.approx(torch.finfo(dtype).eps / UNITS[dtype], rel=0.01)


def test_small_numbers_are_held_to_their_row_and_what_is_not_finite_to_itself() -> None:
    due = torch.tensor([[1000.0, 1e-6, 0.0, -1000.0]])
    assert units_apart([(due + torch.tensor([[0, 1e-5, 1e-5, 0]]), due)]) < 1
    bad = due.clone()
    bad[0, 1] = float("inf")
    assert units_apart([(bad, bad)]) == 0
    assert units_apart([(bad, due)]) == units_apart([(due, bad)]) == float("inf")
    bad[0, 1] = float("nan")
    assert units_apart([(bad, bad)]) == 0
    assert units_apart([(bad, due)]) == float("inf")
    assert units_apart([(torch.zeros(2, 3), torch.zeros(2, 3))]) == units_apart([]) == 0
    assert units_apart([(torch.ones(2, 3), torch.zeros(2, 3))]) == float("inf")
    assert units_apart([(torch.zeros(0, 3), torch.zeros(0, 3))]) == 0


@pytest.mark.parametrize("verify", ["{bounds: {norm: 1e-5}}", "{bound: 0.001}", "{bound: 0}"])
def test_a_bound_below_the_precision_is_a_mistake_of_the_recipe(verify: str) -> None:
    model = CAUSAL["llama"].make(torch.bfloat16)
    before = snapshot(model)
    recipe = recipes.parse(f"name: mine\ndescription: t\nextends: int8\nverify: {verify}\n")
    with pytest.raises(RecipeError, match=r"below the precision of bfloat16, a relative RMSE of 0\.002.*such as 2 u"):
        accelpatch.patch(model, recipe)
    assert snapshot(model) == before
    accelpatch.patch(model, recipe, verify=False)


def test_units_are_written_as_they_are_read() -> None:
    text = "name: t\ndescription: t\nextends: int8\nverify: {bounds: {norm: 3 u, linear: 0.2, rotary: 2.5u}}\n"
    recipe = recipes.parse(text)
    assert recipe.verify.bounds == {"norm": Units(3), "linear": 0.2, "rotary": Units(2.5), "product": Units(2)}
    assert recipes.parse(recipes.dump(recipe)) == recipe
    assert recipe.verify.of("norm", rounds=False) == Units(3)
    assert recipe.verify.of("mlp", rounds=False) == Units(8)
    assert recipe.verify.of("linear", rounds=True) == 0.2
    assert recipe.verify.of("head", rounds=True) == 0.05


@pytest.mark.parametrize("bound", ["0.5 u", "0 u", "-2 u", "u", "2 v", "1e3 u", "9999999 u"])
def test_units_that_mean_nothing(bound: str) -> None:
    with pytest.raises(RecipeError, match="bound"):
        recipes.parse(f"name: t\ndescription: t\nextends: exact\nverify: {{bound: {bound}}}\n")
