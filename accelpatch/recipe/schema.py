"""The schema of a recipe: checks the fields of a YAML document, and merges a document over the one that it extends."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accelpatch.recipe.yaml import Node, shown, suggest

# Roles of a site in its model. A rule for `linear` matches every linear layer but the head and routers.
ROLES = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "fc1", "fc2", "head", "embedding", "norm", "rotary", "mlp", "layer", "attention", "experts", "router", "linear",
    "vision", "audio", "other",
)  # fmt: skip
CACHES = ("auto", "stock")
GRAPHS = ("auto", "off")
SPECULATIONS = ("off", "prompt_lookup")
# Layout of the KV cache -> bytes of a number, and of the scale of a head's row; "auto": numbers of the model's dtype.
KV_CACHES: Mapping[str, tuple[int, int]] = {"auto": (0, 0), "bf16": (2, 0), "int8": (1, 2), "fp8": (1, 2)}
PADDINGS = ("remove", "keep")
LOSSES = ("whole", "chunked")
COMPILES = ("off", "default", "reduce-overhead", "max-autotune")
METRICS = ("relative_rmse", "max_abs", "cosine")
FALLBACKS = ("keep", "error")


@dataclass(frozen=True)
class Units:
    """A bound in units of u, the unit roundoff of a site's dtype (`patching.verify.UNITS`); written "2 u" in YAML."""

    count: float

    def __str__(self) -> str:
        return f"{self.count:g} u"


Bound = float | Units
Reader = Callable[[Node, str], Any]  # of a value and its key


# A glob costs about (length of the site's name) x (length of the pattern); these keep the slowest one far below 1 ms.
MAX_PATTERN = 200
MAX_STARS = 8

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
    description: str = ""
    extends: Node | None = None
    rules: tuple[RuleDraft, ...] = ()
    runtime: Mapping[str, Any] = field(default_factory=dict)
    verify: Mapping[str, Any] = field(default_factory=dict)
    calibrate: Mapping[str, Any] | None = field(default_factory=dict)
    bounds: Mapping[str, Node] = field(default_factory=dict)  # the places of the rule names in verify.bounds


def read_document(node: Node, stem: str) -> Draft:
    """Check one document and return its fields. stem: the recipe's name if it gives none. Raises RecipeError."""
    fields = {"name": stem if _NAME.fullmatch(stem) else "recipe", **_given(node, "a recipe")}
    if "rules" not in fields and "extends" not in fields:
        raise node.error("a recipe needs the key 'rules', or 'extends'")
    if "bounds" in fields.get("verify", ()):
        fields["bounds"] = node.value["verify"].value["bounds"].keys
    return Draft(node, **fields)


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


def _given(node: Node, what: str) -> dict[str, Any]:
    """The fields of a mapping that are given, each as its reader in READERS has it."""
    given = node.mapping(what, READERS[what])
    return {key: read(given[key], key) for key, read in READERS[what].items() if key in given}


def _word(what: str, form: re.Pattern[str]) -> Reader:
    def read(node: Node, key: str) -> str:
        text = node.text(what)
        if not form.fullmatch(text):
            raise node.error(f"{what} has the form {form.pattern}, not {shown(text)}")
        return text

    return read


def _choice(known: Collection[str]) -> Reader:
    return lambda node, key: node.choice(key, known)


def _integer(least: int) -> Reader:
    return lambda node, key: node.integer(key, least)


def _each(read: Reader) -> Reader:
    """Of a text, or of a list of texts."""
    return lambda node, key: tuple(read(item, key) for item in node.words(key))


def _rules(node: Node, key: str) -> tuple[RuleDraft, ...]:
    rules = tuple(RuleDraft(_given(item, "a rule"), item) for item in node.expect(key, list))
    first: dict[str, Node] = {}
    for rule in rules:
        if rule.name in first:
            raise rule.node.error(f"a second rule is named {rule.name!r}; the first is in line {first[rule.name].line}")
        first |= {rule.name: rule.node} if rule.name else {}
    return rules


def _options(node: Node, key: str) -> dict[str, Any]:
    options, check = node.mapping(key), _word("the name of an option", _REPLACER)
    for name in node.keys.values():
        check(name, key)
    return {name: value.plain() for name, value in options.items()}


def _inductor(node: Node, key: str) -> dict[str, Any]:
    options = node.mapping(key)
    for name, value in options.items():
        value.expect(f"{key}.{name}", bool, int, float, str)
    return {name: value.plain() for name, value in options.items()}


def _replacer(node: Node, key: str) -> str:
    text = node.text(key)
    if not _REPLACER.fullmatch(text):
        raise node.error(
            f"replace names a registered replacer (a word such as int8_weight_only) or keep, not {shown(text)}; "
            "a recipe never imports code: register your own replacer in your program, or with --plugin FILE"
        )
    return text


def _match(node: Node, key: str) -> dict[str, Any]:
    fields = _given(node, key)
    if not fields:
        raise node.error("match is empty; say which sites: role, class, name or shape (name: '*' is every site)")
    return {"cls" if name == "class" else name: value for name, value in fields.items()}


def _pattern(node: Node, key: str) -> str:
    text = node.text(key)
    if not text or len(text) > MAX_PATTERN or text.count("*") > MAX_STARS:
        raise node.error(f"a name pattern has 1 to {MAX_PATTERN} characters and at most {MAX_STARS} stars")
    return text


def _shape(node: Node, key: str) -> dict[str, int]:
    shape = _given(node, key)
    for axis in ("n", "k"):
        if shape.get(f"min_{axis}", 0) > shape.get(f"max_{axis}", float("inf")):
            raise node.error(f"min_{axis} is over max_{axis}: no site can match")
    return shape


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


def _unless_null(read: Reader) -> Reader:
    return lambda node, key: None if node.value is None else read(node, key)


def _alpha(node: Node, key: str) -> float | str:
    """The strength of smoothing: 0 to 1, or "search"."""
    if node.value == "search":
        return "search"
    alpha = node.number(key, least=0)
    if alpha > 1:
        raise node.error(f"alpha is {alpha:g}, and it is from 0 to 1, search, or null for no smoothing")
    return alpha


#: mapping in a recipe -> its keys, each with the reader of its value
READERS: Mapping[str, Mapping[str, Reader]] = {
    "a recipe": {
        "name": _word("the name of a recipe", _NAME),
        "description": Node.text,
        "extends": lambda node, key: node,
        "rules": _rules,
        "runtime": _given,
        "verify": _given,
        "calibrate": _unless_null(_given),
    },
    "a rule": {
        "name": _word("the name of a rule", _NAME),
        "match": _match,
        "replace": _replacer,
        "options": _options,
        "otherwise": _choice(FALLBACKS),
        "optional": lambda node, key: node.expect(key, bool),
    },
    "match": {
        "role": _each(_choice(ROLES)),
        "class": _each(_word("the name of a class", _CLASS)),
        "name": _each(_pattern),
        "shape": _shape,
    },
    "shape": dict.fromkeys(("min_n", "max_n", "min_k", "max_k"), _integer(0)),
    "runtime": {
        "cache": _choice(CACHES),
        "graph": _choice(GRAPHS),
        "max_length": _unless_null(_integer(1)),
        "speculate": _choice(SPECULATIONS),
        "kv_cache": _choice(KV_CACHES),
        "padding": _choice(PADDINGS),
        "loss": _choice(LOSSES),
        "compile": _choice(COMPILES),
        "inductor": _inductor,
        "tunableop": _unless_null(Node.text),
    },
    "verify": {
        "metric": _choice(METRICS),
        "bound": _bound,
        "on_failure": _choice(FALLBACKS),
        "bounds": lambda node, key: {
            name: _bound(value, f"the bound of {shown(name)}") for name, value in node.mapping(key).items()
        },
    },
    "calibrate": {"samples": _integer(1), "length": _integer(1), "alpha": _unless_null(_alpha)},
}
