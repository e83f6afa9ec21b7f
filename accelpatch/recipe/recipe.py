"""Recipes: rules that say which modules (sites) of a model are replaced by what, read from strict YAML.

A recipe refers to registered replacers by name, never to an import path or code. docs/recipes.md has the schema.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from accelpatch.errors import ArgumentError, RecipeError
from accelpatch.recipe.schema import Bound, Draft, Units, check_complete, merge, read_document
from accelpatch.recipe.yaml import MAX_BYTES, Node, read, resolve, shown, suggest

MAX_EXTENDS = 16


@dataclass(frozen=True)
class Match:
    """Which sites a rule applies to: each field that is not empty must match, by any one of its items.

    role: see recipe_schema.ROLES. shape: inclusive bounds on a weight [N, K].
    """

    role: tuple[str, ...] = ()
    cls: tuple[str, ...] = ()  # class names along the module's MRO
    name: tuple[str, ...] = ()  # globs over the site's dotted path
    shape: Mapping[str, int] = field(default_factory=dict)  # min_n, max_n, min_k, max_k; inclusive

    def fits_name(self, name: str) -> bool:
        """Whether any glob matches the whole dotted path (``*`` crosses dots); true where the recipe names none."""
        return not self.name or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.name)


@dataclass(frozen=True)
class Rule:
    """Replace the sites of ``match`` by the registered replacer ``replace``, or leave them alone with "keep"."""

    match: Match
    replace: str
    options: Mapping[str, Any] = field(default_factory=dict)
    otherwise: str = "keep"  # where the replacer refuses a site: "keep" the module (the plan says why), or "error"
    optional: bool = False  # a rule that matches no site is an error of the plan unless optional
    name: str = ""
    place: str = field(default="", compare=False)  # "file:line:column", for errors that are found later


@dataclass(frozen=True)
class Runtime:
    """How the patched model runs: the values of CACHES, GRAPHS, SPECULATIONS, KV_CACHES, PADDINGS and COMPILES in
    recipe/schema.py."""

    cache: str = "auto"
    graph: str = "auto"
    max_length: int | None = None  # the most tokens of a sequence
    speculate: str = "off"
    kv_cache: str = "auto"  # the format of cached keys and values; auto: the model's dtype
    padding: str = "remove"  # of batches that encoders take; "keep" computes it
    loss: str = "whole"  # in training; "chunked" holds no more than a part of the logits at once
    compile: str = "off"  # torch.compile's mode for what no fused layer takes
    inductor: Mapping[str, Any] = field(default_factory=dict)  # its options, as torch._inductor.config names them
    tunableop: str | None = None  # a file of tuned GEMMs, of `accelpatch tune tunableop`


@dataclass(frozen=True)
class Verify:
    """How far the output of a replacement may differ from its original's, on the inputs captured at the site.

    A number bounds the error in ``metric``; Units bound each element and the relative RMSE in units of the dtype's
    rounding error. A replacement that keeps its weights' format is judged by Units: by EXACT if the recipe has none.
    """

    metric: str = "relative_rmse"
    bound: Bound = 0.0
    on_failure: str = "keep"
    bounds: Mapping[str, Bound] = field(default_factory=dict)  # rule name -> bound, in place of `bound`

    def of(self, rule: str | None, rounds: bool) -> Bound:
        """The bound for the sites of a rule. rounds: whether its replacement changes the format of a weight."""
        if rule is not None and rule in self.bounds:
            return self.bounds[rule]
        return self.bound if rounds or isinstance(self.bound, Units) else EXACT


EXACT = Units(8)


@dataclass(frozen=True)
class Recipe:
    """A recipe with ``extends`` resolved. The first rule that matches a site decides about it."""

    name: str
    description: str
    rules: tuple[Rule, ...]
    runtime: Runtime = Runtime()
    verify: Verify = Verify()
    calibrate: Mapping[str, Any] | None = None
    source: str = field(default="recipe", compare=False)


def load(recipe: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
    """Load a bundled recipe by name, a YAML file by path (a Path, or text with a "/" or ending in .yaml or .yml), or
    what such a file would hold as a mapping.

    A Recipe is returned as it is. Raises RecipeError, with line and column where the mistake has a place, and
    ArgumentError for anything else.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        try:
            text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise RecipeError(f"it holds what YAML has no form for ({str(error).splitlines()[0]:.100})") from None
        return parse(text, source="the recipe that was given as a mapping")
    if not isinstance(recipe, (str, Path)):
        raise ArgumentError(
            f'the recipe is {recipe!r:.80}: give the name of a bundled one, such as "int8", the path of a YAML file, '
            "a dict of what such a file holds, or a Recipe"
        )
    return _resolved(_locate(recipe))


def parse(text: str, *, source: str = "recipe") -> Recipe:
    """Parse a recipe from YAML text, in which ``extends`` may name bundled recipes only. Raises RecipeError."""
    return _resolved(_Document(text, source, None))


def bundled() -> tuple[str, ...]:
    """The names of the recipes that come with accelpatch, sorted."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _bundle().iterdir() if file.name.endswith(".yaml")))


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with ``extends`` resolved; ``parse`` reads it back as an equal recipe."""
    document: dict[str, Any] = {"name": recipe.name, "description": recipe.description}
    document["rules"] = [_rule_as_yaml(rule) for rule in recipe.rules]
    document["runtime"] = asdict(recipe.runtime)
    verify = recipe.verify
    bounds = {name: _bound_as_yaml(bound) for name, bound in verify.bounds.items()}
    document["verify"] = asdict(verify) | {"bound": _bound_as_yaml(verify.bound), "bounds": bounds}
    if recipe.calibrate is not None:
        document["calibrate"] = dict(recipe.calibrate)
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
    )
    return text


def _bound_as_yaml(bound: Bound) -> float | str:
    return str(bound) if isinstance(bound, Units) else bound


def _rule_as_yaml(rule: Rule) -> dict[str, Any]:
    match = {"role": rule.match.role, "class": rule.match.cls, "name": rule.match.name}
    fields: dict[str, Any] = {"name": rule.name} if rule.name else {}
    fields["match"] = {key: items[0] if len(items) == 1 else list(items) for key, items in match.items() if items}
    fields["match"] |= {"shape": dict(rule.match.shape)} if rule.match.shape else {}
    fields["replace"] = rule.replace
    fields |= {"options": dict(rule.options)} if rule.options else {}
    return fields | {"otherwise": rule.otherwise, "optional": rule.optional}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the reader refuses them, so a list that two rules share is written twice

    def represent_text(self, text: str) -> yaml.Node:
        try:
            bare = isinstance(resolve(text), str)
        except ValueError:
            bare = False
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True)
class _Document:
    data: str | bytes
    source: str
    folder: Path | None  # paths in `extends` are relative to it


def _bundle() -> Traversable:
    shipped = importlib.resources.files("accelpatch") / "recipes"
    checkout = Path(__file__).resolve().parents[2]  # an editable install has the recipes beside the package
    return shipped if shipped.is_dir() or not (checkout / "pyproject.toml").is_file() else checkout / "recipes"


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _locate(name: str | Path) -> _Document:
    if isinstance(name, Path) or _is_path(name):
        return _from_file(Path(name))
    if name not in bundled():
        raise RecipeError(f"no bundled recipe is called {shown(name)}; {suggest(name, bundled())}")
    data = (_bundle() / f"{name}.yaml").read_bytes()
    return _Document(data, f"{name}.yaml", None)


def _from_file(path: Path) -> _Document:
    try:
        if not path.is_file():
            raise RecipeError("no such file; 'accelpatch recipes' lists the bundled recipes", source=str(path))
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RecipeError(f"cannot be read: {error}", source=str(path)) from None
    return _Document(data, str(path), path.parent)


def _resolved(document: _Document) -> Recipe:
    draft = _draft(document, ())
    check_complete(draft)
    rules = (
        Rule(**{**rule.fields, "match": Match(**rule.fields["match"])}, place=rule.node.place) for rule in draft.rules
    )
    return Recipe(
        name=draft.name,
        description=draft.description,
        rules=tuple(rules),
        runtime=Runtime(**draft.runtime),
        verify=Verify(**draft.verify),
        calibrate=draft.calibrate or None,
        source=document.source,
    )


def _draft(document: _Document, chain: tuple[str, ...]) -> Draft:
    """The document merged over the recipe that it extends. chain: the sources that led to it, to detect cycles."""
    draft = read_document(read(document.data, document.source), Path(document.source).stem)
    if document.folder is not None and (file := draft.runtime.get("tunableop")):
        draft = replace(draft, runtime={**draft.runtime, "tunableop": str(document.folder / file)})
    if draft.extends is None:
        return draft
    base = _base(draft.extends, document)
    chain = (*chain, document.source)
    if base.source in chain:
        raise draft.extends.error(f"extends goes in a circle: {' -> '.join((*chain, base.source))}")
    if len(chain) >= MAX_EXTENDS:
        raise draft.extends.error(f"more than {MAX_EXTENDS} recipes extend each other")
    return merge(_draft(base, chain), draft)


def _base(extends: Node, document: _Document) -> _Document:
    name = extends.text("extends")
    try:
        if not _is_path(name):
            return _locate(name)
        if document.folder is None:
            raise extends.error("a path needs a file to be relative to; load the recipe from a file")
        if not name.endswith((".yaml", ".yml")):
            raise extends.error(f"a recipe's file ends in .yaml or .yml, not {shown(name)}")
        return _from_file((document.folder / name).resolve())
    except RecipeError as error:
        raise error if error.line else extends.error(str(error)) from None
