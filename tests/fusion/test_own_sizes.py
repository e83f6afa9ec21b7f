"""Fused layers, embedding and head in sizes of their own, where the CPU stands in for a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.runtime.generation.patched_model import RUNTIME
from tests.fusion.test_fused_layer import CAPTURED, FUSED, OPTIONS, RECIPES, _as_on_a_gpu  # noqa: F401
from tests.support.resized import OTHERS, SIZES, Change
from tests.support.tiny import CAUSAL, HIDDEN, full_batch, padded_batch

orders = pytest.mark.parametrize("first", [True, False], ids=["before-the-patch", "after-it"])
recipes = pytest.mark.parametrize("recipe", ["exact", "int8"])


def held(change: Change, recipe: str, *, first: bool, name: str = "qwen3") -> dict[str, int]:
    """How a model ran that was changed before or after the patch. Its tokens are its modules', and the stock model's
    once it is unpatched."""
    model, stock = CAUSAL[name].make(), CAUSAL[name].make()
    change(stock)
    if first:
        change(model)
    accelpatch.patch(model, RECIPES[recipe], verify=first)
    if not first:
        change(model)
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    for batch in (full_batch(), padded_batch()):
        assert torch.equal(model.generate(**batch, **OPTIONS), plain.generate(**batch, **OPTIONS))
    paths = dict(model.accelpatch.report().paths)
    accelpatch.unpatch(model)
    assert torch.equal(model.generate(**full_batch(), **OPTIONS), stock.generate(**full_batch(), **OPTIONS))
    return paths


@pytest.mark.each_value
@recipes
@orders
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_its_own(name: str, first: bool, recipe: str) -> None:
    paths = held(SIZES[name], recipe, first=first)
    assert paths[FUSED] == paths[CAPTURED] == 22


@pytest.mark.each_value
@orders
@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_with_another_module_runs_its_modules(name: str, first: bool) -> None:
    place, change = OTHERS[name]
    paths = held(change, "int8", first=first)
    assert paths[f"{FUSED}, but modules in layers [{place}]: a linear layer is Sequential"] == paths[CAPTURED] == 22


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen2"])
def test_sizes_of_other_families(name: str) -> None:
    def all_of_them(model: Any) -> None:
        for size in ("pruned-heads", "pruned-mlp", "larger-head"):
            SIZES[size](model)

    assert held(all_of_them, "int8", first=True, name=name)[FUSED] == 22


def test_heads_that_are_none_run_their_modules() -> None:
    """q, k and v are made by one linear layer, whose rows say nothing of which are whose."""
    model = CAUSAL["phi3"].make(torch.bfloat16)
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = nn.Linear(HIDDEN, attention.qkv_proj.out_features - 32, bias=False, dtype=torch.bfloat16)
    report = accelpatch.plan(model, "exact", device=KNOWN["sm_90"]).report()
    (reason,) = {site.by_modules for site in report.sites if site.fused is False}
    assert reason is not None
    assert reason.endswith("96 rows of q, k and v are no heads of 16 columns")
