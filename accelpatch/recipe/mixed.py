"""Recipes with bits of their own for each layer: the formats to choose among, and the recipe of a choice."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from accelpatch.errors import ArgumentError, RecipeError
from accelpatch.recipe.methods import ROUNDED
from accelpatch.recipe.recipe import Recipe, Rule

KEPT = ("rounding", "act_order", "scale_search", "damping")  # options of a rule that do not belong to one format
_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:bits?)?\s*")


@dataclass(frozen=True)
class Format:
    """A format that layers can have: the replacers of linear layers and of experts, and the options of each."""

    linear: str
    experts: str
    options: Mapping[str, Any]
    of_experts: Mapping[str, Any] = field(default_factory=dict)  # where theirs differ

    def of(self, rule: Rule) -> Rule:
        """The rule with this format in place of its own."""
        experts = rule.replace.endswith("_experts")
        options = {name: value for name, value in rule.options.items() if name in KEPT}
        options |= (self.of_experts or self.options) if experts else self.options
        return replace(rule, replace=self.experts if experts else self.linear, options=options)


def _int4(group: list[int], linear: str = "int4_weight_only") -> Format:
    return Format(linear, "int4_experts", {"group_size": group, "symmetric": False})


#: the name of a format, which is that of its rule too -> the format
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "3-bits-by-128": _int4([128, 64, 32], "int3_weight_only"),
        "3-bits-by-64": _int4([64, 32], "int3_weight_only"),
        "4-bits-by-128": _int4([128, 64, 32]),
        "4-bits-by-64": _int4([64, 32]),
        "4-bits-by-32": _int4([32]),
        "8-bits": Format(
            "int8_weight_only", "int8_experts", {"group_size": [128, 64, 32, None], "half_scales": True},
            {"group_size": [128, 64, 32, None]},
        ),
    }
)  # fmt: skip


def uniform(recipe: Recipe, name: str) -> Recipe:
    """The recipe with one of FORMATS in all its rounded layers but the head. Raises RecipeError where it has none."""
    rules = tuple(FORMATS[name].of(rule) if _rounds(rule) else rule for rule in recipe.rules)
    if not any(map(_rounds, recipe.rules)):
        raise RecipeError(f"{recipe.name} has no layers whose bits could be chosen: of {', '.join(ROUNDED)}")
    return replace(recipe, rules=rules)


def mixed(recipe: Recipe, chosen: Mapping[str, str], budget: float) -> Recipe:
    """The recipe in which each path of `chosen` has the format of that name; the other layers keep the recipe's own.

    One rule for each format and each rule that it stands before, with those paths as its names that the rule fits.
    """
    rules, bounds = list[Rule](), dict(recipe.verify.bounds)
    names = {rule.name for rule in recipe.rules}
    for rule in recipe.rules:
        for name, format in FORMATS.items() if _rounds(rule) else ():
            if paths := tuple(path for path, one in chosen.items() if one == name and rule.match.fits_name(path)):
                named = _other(f"{name}-experts" if rule.replace.endswith("_experts") else name, names)
                names.add(named)
                match = replace(rule.match, name=paths)
                rules.append(replace(format.of(rule), match=match, name=named, optional=True))
                bounds |= {named: bounds[rule.name]} if rule.name in bounds else {}
        rules.append(replace(rule, optional=True) if _rounds(rule) else rule)
    return replace(
        recipe, name=f"{recipe.name}-{budget:g}-bits", rules=tuple(rules), verify=replace(recipe.verify, bounds=bounds),
        description=f"{recipe.name} with {budget:g} bits a weight on average, chosen layer by layer by measured KL.",
    )  # fmt: skip


def _other(name: str, names: Collection[str]) -> str:
    """The name, or with a number where a rule has it already."""
    each = (name, *(f"{name}-{number}" for number in range(2, len(names) + 3)))
    return next(one for one in each if one not in names)


def budget_of(text: str) -> float:
    """Bits a weight of a text such as "4.5bits" or "4.5". Raises ArgumentError."""
    found = _BUDGET.fullmatch(text)
    bits = float(found[1]) if found else math.nan
    if not 0 < bits <= 32:
        raise ArgumentError(f"the budget is {text!r}: give bits a weight, such as 4.5bits")
    return bits


def _rounds(rule: Rule) -> bool:
    return rule.replace in ROUNDED and "head" not in rule.match.role
