"""Which modules become sites, under which role, and which rule takes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.patching.match import matches, role_of, sites
from accelpatch.patching.site import Site
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Match
from tests.models.test_class_rules import build
from tests.support.tiny import CAUSAL, snapshot, unique_bytes

SITE = Site(
    "model.layers.3.self_attn.q_proj", nn.Linear(64, 32), "q_proj", ("Linear", "Module"), n=32, k=64,
    own_paths=("model.layers.3.self_attn.q_proj", "again.q"),
)  # fmt: skip
BARE = Site("model.rotary", nn.Identity(), "rotary", ("Identity", "Module"), own_paths=("model.rotary",))


@pytest.mark.parametrize(
    "match, taken",
    [
        pytest.param({}, True, id="nothing-said"),
        pytest.param({"role": ("q_proj",)}, True, id="role"),
        pytest.param({"role": ("linear",)}, True, id="linear-is-every-inner-product"),
        pytest.param({"role": ("head", "k_proj")}, False, id="other-roles"),
        pytest.param({"role": ("k_proj", "q_proj")}, True, id="any-role"),
        pytest.param({"cls": ("Linear",)}, True, id="class"),
        pytest.param({"cls": ("Module",)}, True, id="base-class"),
        pytest.param({"cls": ("Conv1D",)}, False, id="other-class"),
        pytest.param({"name": ("model.layers.3.*",)}, True, id="glob"),
        pytest.param({"name": ("again.*",)}, True, id="second-name"),
        pytest.param({"name": ("layers.3.*",)}, False, id="glob-of-a-part"),
        pytest.param({"name": ("*.[0-2].*",)}, False, id="glob-of-other-layers"),
        pytest.param({"shape": {"min_n": 32, "max_n": 32, "min_k": 64, "max_k": 64}}, True, id="bounds-are-inclusive"),
        pytest.param({"shape": {"min_n": 33}}, False, id="n-too-small"),
        pytest.param({"shape": {"max_n": 31}}, False, id="n-too-large"),
        pytest.param({"shape": {"min_k": 65}}, False, id="k-too-small"),
        pytest.param({"shape": {"max_k": 63}}, False, id="k-too-large"),
        pytest.param({"role": ("q_proj",), "cls": ("Conv1D",)}, False, id="every-key-must-match"),
    ],
)
def test_a_match(match: dict[str, Any], taken: bool) -> None:
    assert matches(SITE, Match(**match)) is taken


@pytest.mark.parametrize("bound", ["min_n", "max_n", "min_k", "max_k"])
def test_what_has_no_matrix_is_within_no_bound(bound: str) -> None:
    assert matches(BARE, Match())
    assert not matches(BARE, Match(shape={bound: 1}))


@pytest.mark.parametrize(
    "path, module, role",
    [
        pytest.param("h.0.attn.c_attn", nn.Linear(2, 2), "qkv_proj", id="family-glob"),
        pytest.param("h.0.attn.other", nn.Linear(2, 2), "linear", id="linear"),
        pytest.param("x.y", nn.Embedding(2, 2), "embedding", id="embedding"),
        pytest.param("ln", nn.LayerNorm(2), "norm", id="layer-norm"),
        pytest.param("ln", nn.RMSNorm(2), "norm", id="rms-norm"),
        pytest.param("conv", nn.Conv1d(2, 2, 2), "other", id="convolution-is-no-expert"),
        pytest.param("act", nn.ReLU(), "other", id="other"),
        pytest.param("layers.12", nn.Identity(), "layer", id="number-at-the-end"),
        pytest.param("layers.12.sub", nn.Identity(), "other", id="glob-is-of-the-whole-name"),
    ],
)
def test_the_role_of_a_module(path: str, module: nn.Module, role: str) -> None:
    assert role_of(path, module, {"h.#.attn.c_attn": "qkv_proj", "layers.#": "layer"}, None) == role
    assert role_of(path, module, {"*": "mlp"}, module) == "head"


def test_three_dimensional_parameters_are_experts() -> None:
    module = nn.Module()
    module.stack = nn.Parameter(torch.zeros(2, 4, 4))
    assert role_of("x", module, {}, None) == "experts"
    module.stack = nn.Parameter(torch.zeros(1, 4, 4))
    assert role_of("x", module, {}, None) == "other"


def test_the_models_own_parameters_are_counted_too() -> None:
    """A model may own a parameter itself, in no child (a class token, a scale)."""
    model = CAUSAL["llama"].make()
    model.scale = nn.Parameter(model.lm_head.weight.detach()[0].clone())
    before = snapshot(model)
    plan = accelpatch.plan(model, everything())
    report = plan.report()
    assert sum(site.resident_bytes[0] for site in report.sites) == unique_bytes(model)
    own = next(site for site in report.sites if site.path == "(model)")
    assert own.reason == "parameters of the model itself, in none of its modules"
    assert "(model)" in str(plan)
    accelpatch.patch(model, everything())
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def everything() -> recipes.Recipe:
    """A rule that every site matches."""
    return recipes.parse("name: t\ndescription: t\nrules: [{match: {name: '*'}, replace: int8_weight_only}]\n"
                         "verify: {bound: 0.1}\n")  # fmt: skip


def test_a_class_token_is_no_expert() -> None:
    sites = accelpatch.plan(build("vit"), "int8").report().sites
    embeddings = next(site for site in sites if site.path == "vit.embeddings")
    assert (embeddings.role, embeddings.reason) == ("other", "no rule of the recipe matches")


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "gpt2"])
def test_every_parameter_has_one_site(name: str) -> None:
    model = CAUSAL[name].make()
    found = sites(model, {})
    owners = Counter(
        id(parameter)
        for site in found
        for member in (site, *site.tied)
        for parameter in member.original._parameters.values()
    )
    assert set(owners) >= {id(parameter) for parameter in model.parameters()}
    assert sum(site.bytes for site in found) == unique_bytes(model)
    assert len({path for site in found for path in site.paths}) == sum(len(site.paths) for site in found)
