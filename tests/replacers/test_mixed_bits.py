"""Bits chosen layer by layer within a budget: measured, kept, better than uniform ones, and a recipe of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import ArgumentError, KernelError, PatchError, RecipeError
from accelpatch.models.texts import windows
from accelpatch.patching.verify import kl_divergence
from accelpatch.quant.budget import Option, allocate
from accelpatch.recipe import mixed
from accelpatch.recipe import recipe as recipes
from tests.replacers.test_rounding import correlated
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, EXPERTS, snapshot

BUDGET = 5.5
HEADS = ("lm_head", "embed_tokens", "wte")


def bits_of(model: Any) -> float:
    """Bits a weight of the quantised layers but the head, with their scales, from the patched model itself."""
    bits = weights = 0
    for path, module in model.named_modules():
        if hasattr(module, "canonical") and path.rpartition(".")[2] not in HEADS:
            held = module.canonical()
            bits += 8 * sum(one.nbytes for one in held.tensors().values())
            weights += held.n * held.k
    return bits / weights


def test_the_choice_is_a_recipe_within_the_budget(tmp_path: Path) -> None:
    model: Any = correlated()
    before = snapshot(model)
    chosen = accelpatch.choose_bits(model, BUDGET, progress=False)
    assert snapshot(model) == before
    file = tmp_path / "mine.yaml"
    file.write_text(chosen.text())
    assert recipes.load(file) == chosen.recipe
    accelpatch.patch(model, file, progress=False)
    report = model.accelpatch.report()
    assert {"int4_weight_only", "int8_weight_only"} <= {site.replacer for site in report.sites}
    assert bits_of(model) == pytest.approx(chosen.bits)
    assert chosen.bits <= BUDGET < chosen.bits + 0.3
    of_one_input = [layer.paths for layer, _ in chosen.layers if layer.paths[0].endswith("q_proj")]
    assert all([path.rpartition(".")[2] for path in one] == ["q_proj", "k_proj", "v_proj"] for one in of_one_input)
    assert not [site.reason for site in report.sites if site.fused is False]


def test_it_is_nearer_to_the_original_than_uniform_bits() -> None:
    """Of a model whose first layers matter more than its last."""
    text = windows(CAUSAL["llama"].make(), None, None, 8, 64)[0]
    due, losses = logits(CAUSAL["llama"].make(), text).flatten(0, 1), {}
    uniform = mixed.uniform(recipes.load("int4"), "4-bits-by-32")
    chosen = accelpatch.choose_bits(CAUSAL["llama"].make(), 5.0, progress=False)
    for which, recipe in (("uniform", uniform), ("chosen", chosen.recipe)):
        model: Any = CAUSAL["llama"].make()
        accelpatch.patch(model, recipe, verify=False, progress=False)
        assert bits_of(model) <= 5.0
        losses[which] = float(kl_divergence(due, logits(model, text).flatten(0, 1)).mean())
    assert losses["chosen"] < losses["uniform"]


TWO = """name: two
extends: int4
rules:
  - name: values
    match: {name: "*v_proj"}
    replace: int4_weight_only
    options: {group_size: [32], rounding: gptq}
"""


def test_layers_keep_the_rounding_of_their_own_rule_and_names_of_rules_differ() -> None:
    formats = dict.fromkeys((f"model.layers.0.self_attn.{one}_proj" for one in "qkvo"), "4-bits-by-64")
    once = mixed.mixed(recipes.parse(TWO), formats, 4.5)
    again = mixed.mixed(once, formats, 4.5)
    for recipe in (once, again):
        assert recipes.parse(recipes.dump(recipe)) == recipe
        for path in formats:
            fitting = (rule for rule in recipe.rules if rule.match.name and rule.match.fits_name(path))
            assert ("rounding" in next(fitting).options) == path.endswith("v_proj"), path


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.replacers import mixed_bits

    first = accelpatch.choose_bits(correlated(), BUDGET, progress=False, resume=tmp_path)
    monkeypatch.setattr(mixed_bits, "_options", lambda *arguments: pytest.fail("measured again"))
    again = accelpatch.choose_bits(correlated(), BUDGET, progress=False, resume=tmp_path)
    assert again == first


def test_experts_are_chosen_for_too() -> None:
    model: Any = EXPERTS["mixtral"].make()
    chosen = accelpatch.choose_bits(model, 6.0, progress=False)
    assert any(path.endswith("experts") for layer, _ in chosen.layers for path in layer.paths)
    accelpatch.patch(model, chosen.recipe, progress=False)
    kinds = {site.replacer for site in model.accelpatch.report().sites}
    assert {"int4_experts", "int8_experts"} & kinds


def test_the_knapsack() -> None:
    layers = [
        [Option("4", 40, 1.0), Option("8", 80, 0.1)],
        [Option("4", 40, 5.0), Option("8", 80, 0.2)],
        [Option("4", 10, 2.0), Option("8", 20, 1.9)],
    ]
    assert [one.name for one in allocate(layers, 90)] == ["4", "4", "4"]
    assert [one.name for one in allocate(layers, 130)] == ["4", "8", "4"]
    assert [one.name for one in allocate(layers, 140)] == ["4", "8", "8"]
    assert [one.name for one in allocate(layers, 1000)] == ["8", "8", "8"]


@pytest.mark.parametrize(
    ("budget", "recipe", "error", "words"),
    [
        pytest.param(2, "int4", KernelError, "below the 3", id="below every format"),
        pytest.param("much", "int4", ArgumentError, "such as 4.5bits", id="no number"),
        pytest.param(4.5, "exact", RecipeError, "no layers whose bits", id="nothing to choose"),
    ],
)
def test_bad_input(budget: Any, recipe: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        accelpatch.choose_bits(CAUSAL["llama"].make(), budget, recipe, progress=False)


def test_logits_that_are_not_finite() -> None:
    model: Any = CAUSAL["llama"].make()
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(one) % 100 for one in text]}

    with pytest.raises(PatchError, match="logits are NaN or infinite: load it in bfloat16"):
        accelpatch.choose_bits(model, BUDGET, progress=False, data=["A text to measure by." * 9], tokenizer=tokenizer)
