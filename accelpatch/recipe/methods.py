"""Methods of making quantised weights, applied to a recipe: which options of its rules and of calibration they set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from accelpatch.errors import RecipeError
from accelpatch.recipe.recipe import Match, Recipe, Rule, load

ROUNDED = (
    "int3_weight_only",
    "int4_weight_only",
    "int8_weight_only",
    "int4_experts",
    "int8_experts",
)  # replacers with the options of calibrated rounding
GPTQ: Mapping[str, Any] = MappingProxyType({"rounding": "gptq", "act_order": True, "scale_search": True})
#: method -> (options of rules, of `calibrate`)
METHODS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "rtn": ({}, {}),
        "gptq": (GPTQ, {}),
        "awq": ({"scale_search": True}, {"alpha": "search"}),
        "gptq+awq": (GPTQ, {"alpha": "search"}),
    }
)
BITS: Mapping[int, str] = MappingProxyType({3: "int3", 4: "int4", 8: "int8"})  # -> the bundled recipe
NORMS = Match(role=("norm",), cls=("LayerNorm", "CohereLayerNorm", "Cohere2LayerNorm"))
TEXT: Mapping[str, int] = MappingProxyType({"samples": 64, "length": 256})


def by_method(recipe: Recipe, method: str, samples: int | None = None, length: int | None = None) -> Recipe:
    """The recipe with its weight-only linear layers made by a method. samples, length: of the calibration text.

    Raises RecipeError for an unknown method, and for a recipe that has no such layers.
    """
    if method not in METHODS:
        raise RecipeError(f"no method is called {method!r}; known: {', '.join(METHODS)}")
    options, calibrate = METHODS[method]
    if not options:
        return recipe
    rules = tuple(_with(rule, options) for rule in recipe.rules)
    if rules == recipe.rules:
        raise RecipeError(f"{recipe.name} has no linear layers that {method} makes: of {', '.join(ROUNDED)}")
    if "alpha" in calibrate and all(rule.replace != "layernorm" for rule in rules):
        rules = (Rule(NORMS, "layernorm", optional=True, name="layernorm"), *rules)
    made = replace(recipe, name=f"{recipe.name}-{method.replace('+', '-')}", rules=rules)
    return with_text(replace(made, calibrate={**TEXT, **(recipe.calibrate or {}), **calibrate}), samples, length)


def with_text(recipe: Recipe, samples: int | None, length: int | None) -> Recipe:
    """The recipe with other sizes of its calibration text. Raises RecipeError where it does not calibrate."""
    asked = {name: value for name, value in (("samples", samples), ("length", length)) if value is not None}
    if asked and recipe.calibrate is None:
        raise RecipeError(f"{recipe.name} does not calibrate, so that samples and length say nothing")
    return replace(recipe, calibrate={**recipe.calibrate, **asked}) if recipe.calibrate is not None else recipe


def of_bits(bits: int) -> Recipe:
    """The bundled recipe whose linear layers have so many bits. Raises RecipeError where there is none."""
    if bits not in BITS:
        raise RecipeError(f"no recipe has weights of {bits} bits; known: {', '.join(map(str, BITS))}")
    return load(BITS[bits])


def _with(rule: Rule, options: Mapping[str, Any]) -> Rule:
    if rule.replace not in ROUNDED or "head" in rule.match.role:
        return rule
    return replace(rule, options={**rule.options, **options})
