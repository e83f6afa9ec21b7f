"""The schema of a recipe: checks the fields of a YAML document, and merges a document over the one that it extends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accelpatch.recipe.yaml import Node, shown, suggest

# Roles of a site in its model. A rule for `linear` matches every linear layer but the head and routers.
ROLES = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "fc1", "fc2", "head", "embedding", "norm", "rotary", "mlp", "layer", "attention", "experts", "router", "linear",
    "other",
)  # fmt: skip
CACHES = ("auto", "stock")
GRAPHS = ("auto", "off")
SPECULATIONS = ("off", "prompt_lookup")
METRICS = ("relative_rmse", "max_abs", "cosine")
FALLBACKS = ("keep", "error")


@dataclass(frozen=True)
class Units:
    """A bound in units of u, the unit roundoff of a site's dtype (`patching.verify.UNITS`); written "2 u" in YAML."""

    count: float

    def __str__(self) -> str:
        return f"{self.count:g} u"


Bound = float | Units


# A glob costs about (length of the site's name) x (length of the pattern); these keep the slowest one far below 1 ms.
MAX_PATTERN = 200
MAX_STARS = 8

_RECIPE_KEYS = ("name", "description", "extends", "rules", "runtime", "verify", "calibrate")
_RULE_KEYS = ("name", "match", "replace", "options", "otherwise", "optional")
_MATCH_KEYS = ("role", "class", "name", "shape")
_SHAPE_KEYS = ("min_n", "max_n", "min_k", "max_k")
_RUNTIME_KEYS = ("cache", "graph", "max_length", "speculate")
_VERIFY_KEYS = ("metric", "bound", "on_failure", "bounds")
_CALIBRATE_KEYS = ("samples", "length", "alpha")

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_REPLACER = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True)
class RuleDraft:
    """The fields given in one rule: keyword arguments of recipe.Rule, and under "match" those of recipe.Match."""

    fields: Mapping[str, Any]
    node: Node

    @property
    def name(self) -> str:
        name: str = self.fields.get("name", "")
        return name


@dataclass(frozen=True)
class Draft:
    """The fields given in one document, or those of several documents merged along ``extends``."""

    node: Node
    name: str
    description: str
    extends: Node | None
    rules: tuple[RuleDraft, ...]
    runtime: Mapping[str, Any]
    verify: Mapping[str, Any]
    calibrate: Mapping[str, Any] | None
    bounds: Mapping[str, Node]  # the places of the rule names in verify.bounds


def read_document(node: Node, stem: str) -> Draft:
    """Check one document and return its fields. stem: the recipe's name if it gives none. Raises RecipeError."""
    fields = node.mapping("a recipe", _RECIPE_KEYS)
    if "rules" not in fields and "extends" not in fields:
        raise node.error("a recipe needs the key 'rules', or 'extends'")
    verify = fields["verify"].mapping("verify", _VERIFY_KEYS) if "verify" in fields else {}
    calibrate = fields.get("calibrate")
    return Draft(
        node=node,
        name=_word(fields["name"], "the name of a recipe", _NAME) if "name" in fields else _stem(stem),
        description=fields["description"].text("description") if "description" in fields else "",
        extends=fields.get("extends"),
        rules=_rules(fields["rules"]) if "rules" in fields else (),
        runtime=_runtime(fields["runtime"]) if "runtime" in fields else {},
        verify=_verify(verify),
        calibrate=_calibrate(calibrate) if calibrate is not None else {},
        bounds=verify["bounds"].keys if "bounds" in verify else {},
    )


def merge(base: Draft, over: Draft) -> Draft:
    """Merge ``over`` into the ``base`` that it extends: rules override those of the same name, new rules come first.

    All other keys are overridden one by one. Raises RecipeError for a rule that neither overrides nor has a match.
    """
    named = {rule.name: rule for rule in over.rules if rule.name}
    inherited = [_merge_rule(rule, named[rule.name]) if rule.name in named else rule for rule in base.rules]
    known = {rule.name for rule in base.rules if rule.name}
    new = [rule for rule in over.rules if rule.name not in known]
    for rule in new:
        if rule.name and "match" not in rule.fields:
            message = f"rule {rule.name!r} overrides nothing and has no key 'match'; {suggest(rule.name, known)}"
            raise rule.node.error(message)
    verify = {**base.verify, **over.verify}
    if "bounds" in over.verify:
        verify["bounds"] = {**base.verify.get("bounds", {}), **over.verify["bounds"]}
    calibrate = None if over.calibrate is None else {**(base.calibrate or {}), **over.calibrate}
    return replace(over, rules=(*new, *inherited), runtime={**base.runtime, **over.runtime}, verify=verify,
                   calibrate=calibrate)  # fmt: skip


def _merge_rule(base: RuleDraft, over: RuleDraft) -> RuleDraft:
    fields = {**base.fields, **over.fields}
    same_replacer = fields.get("replace") == base.fields.get("replace")  # options belong to one replacer
    inherited = base.fields.get("options", {}) if same_replacer else {}
    fields["options"] = {**inherited, **over.fields.get("options", {})}
    return RuleDraft(fields, over.node)


def check_complete(draft: Draft) -> None:
    """The checks that need the merged recipe: keys that a rule must have, names in bounds. Raises RecipeError."""
    if not draft.rules:
        raise draft.node.error("a recipe needs at least one rule")
    for rule in draft.rules:
        for key in ("match", "replace"):
            if key not in rule.fields:
                raise rule.node.error(f"a rule needs the key {key!r}")
        if rule.fields["replace"] == "keep" and rule.fields.get("options"):
            raise rule.node.error("a rule that keeps its sites has no options; name a replacer, or leave them out")
    names = [rule.name for rule in draft.rules if rule.name]
    for name, node in draft.bounds.items():
        if name not in names:
            raise node.error(f"verify.bounds: no rule is named {shown(name)}; {suggest(name, names)}")


def _stem(stem: str) -> str:
    return stem if _NAME.fullmatch(stem) else "recipe"


def _word(node: Node, what: str, form: re.Pattern[str]) -> str:
    text = node.text(what)
    if not form.fullmatch(text):
        raise node.error(f"{what} has the form {form.pattern}, not {shown(text)}")
    return text


def _rules(node: Node) -> tuple[RuleDraft, ...]:
    rules = tuple(_rule(item) for item in node.expect("rules", list))
    first: dict[str, Node] = {}
    for rule in rules:
        if rule.name in first:
            raise rule.node.error(f"a second rule is named {rule.name!r}; the first is in line {first[rule.name].line}")
        first |= {rule.name: rule.node} if rule.name else {}
    return rules


def _rule(node: Node) -> RuleDraft:
    given = node.mapping("a rule", _RULE_KEYS)
    fields: dict[str, Any] = {}
    if "name" in given:
        fields["name"] = _word(given["name"], "the name of a rule", _NAME)
    if "match" in given:
        fields["match"] = _match(given["match"])
    if "replace" in given:
        fields["replace"] = _replacer(given["replace"])
    if "options" in given:
        options = given["options"].mapping("options")
        for key in options:
            _word(given["options"].keys[key], "the name of an option", _REPLACER)
        fields["options"] = {key: value.plain() for key, value in options.items()}
    if "otherwise" in given:
        fields["otherwise"] = given["otherwise"].choice("otherwise", FALLBACKS)
    if "optional" in given:
        fields["optional"] = given["optional"].flag("optional")
    return RuleDraft(fields, node)


def _replacer(node: Node) -> str:
    text = node.text("replace")
    if not _REPLACER.fullmatch(text):
        raise node.error(
            f"replace names a registered replacer (a word such as int8_weight_only) or keep, not {shown(text)}; "
            "a recipe never imports code: register your own replacer in your program, or with --plugin FILE"
        )
    return text


def _match(node: Node) -> dict[str, Any]:
    given = node.mapping("match", _MATCH_KEYS)
    if not given:
        raise node.error("match is empty; say which sites: role, class, name or shape (name: '*' is every site)")
    fields: dict[str, Any] = {}
    if "role" in given:
        fields["role"] = tuple(item.choice("role", ROLES) for item in given["role"].words("role"))
    if "class" in given:
        fields["cls"] = tuple(_word(item, "the name of a class", _CLASS) for item in given["class"].words("class"))
    if "name" in given:
        fields["name"] = tuple(_pattern(item) for item in given["name"].words("name"))
    if "shape" in given:
        fields["shape"] = _shape(given["shape"])
    return fields


def _pattern(node: Node) -> str:
    text = node.text("name")
    if not text or len(text) > MAX_PATTERN or text.count("*") > MAX_STARS:
        raise node.error(f"a name pattern has 1 to {MAX_PATTERN} characters and at most {MAX_STARS} stars")
    return text


def _shape(node: Node) -> dict[str, int]:
    given = node.mapping("shape", _SHAPE_KEYS)
    shape = {key: value.integer(key, least=0) for key, value in given.items()}
    for axis in ("n", "k"):
        if shape.get(f"min_{axis}", 0) > shape.get(f"max_{axis}", float("inf")):
            raise node.error(f"min_{axis} is over max_{axis}: no site can match")
    return shape


def _runtime(node: Node) -> dict[str, Any]:
    given = node.mapping("runtime", _RUNTIME_KEYS)
    fields: dict[str, Any] = {}
    if "cache" in given:
        fields["cache"] = given["cache"].choice("cache", CACHES)
    if "graph" in given:
        fields["graph"] = given["graph"].choice("graph", GRAPHS)
    if "max_length" in given:
        length = given["max_length"]
        fields["max_length"] = None if length.value is None else length.integer("max_length", least=1)
    if "speculate" in given:
        fields["speculate"] = given["speculate"].choice("speculate", SPECULATIONS)
    return fields


def _verify(given: Mapping[str, Node]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "metric" in given:
        fields["metric"] = given["metric"].choice("metric", METRICS)
    if "bound" in given:
        fields["bound"] = _bound(given["bound"], "bound")
    if "on_failure" in given:
        fields["on_failure"] = given["on_failure"].choice("on_failure", FALLBACKS)
    if "bounds" in given:
        bounds = given["bounds"].mapping("bounds")
        fields["bounds"] = {key: _bound(value, f"the bound of {shown(key)}") for key, value in bounds.items()}
    return fields


_UNITS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*u\s*")


def _bound(node: Node, what: str) -> Bound:
    """A bound from YAML: a number, or units such as "2 u"."""
    units = _UNITS.fullmatch(node.value) if isinstance(node.value, str) else None
    if units is None:
        return node.number(what, least=0)
    count = float(units[1])
    if not 1 <= count < 1e6:
        raise node.error(f"{what} is {count:g} units of the dtype's rounding error, and 1 is the least that can be met")
    return Units(count)


def _calibrate(node: Node) -> dict[str, Any] | None:
    if node.value is None:
        return None
    given = node.mapping("calibrate", _CALIBRATE_KEYS)
    found: dict[str, Any] = {key: given[key].integer(key, least=1) for key in ("samples", "length") if key in given}
    return found | ({"alpha": _alpha(given["alpha"])} if "alpha" in given else {})


def _alpha(node: Node) -> float | str | None:
    """The strength of smoothing: 0 to 1, "search", or null for none."""
    if node.value is None:
        return None
    if node.value == "search":
        return "search"
    alpha = node.number("alpha", least=0)
    if alpha > 1:
        raise node.error(f"alpha is {alpha:g}, and it is from 0 to 1, search, or null for no smoothing")
    return alpha
