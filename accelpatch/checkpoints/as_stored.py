"""The recipe by which the weights of a GGUF file keep their stored formats: rules for its formats in place of the rule
`as_stored`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import accelpatch.models.load as loading
from accelpatch.checkpoints.gguf_tensors import BLOCKS, GgufFile, open_gguf
from accelpatch.checkpoints.quantization_config import AccelpatchConfig
from accelpatch.errors import LoadError
from accelpatch.models.catalog import resolve
from accelpatch.models.load import Loaded
from accelpatch.recipe.recipe import Recipe, Rule

AS_STORED = "as_stored"  # the replacer that a recipe names
GROUP = 32  # values that share a scale, in all formats of one level
OF_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")
Form = tuple[str, str]  # replacer, form of the blocks


def wants(recipe: Recipe) -> bool:
    """Whether a recipe takes weights as a GGUF file has them."""
    return any(rule.replace == AS_STORED for rule in recipe.rules)


def recipe_of(recipe: Recipe, file: GgufFile) -> Recipe:
    """The recipe with a rule for each format that the file has, in place of each that says `as_stored`."""
    rules, bounds = list[Rule](), dict(recipe.verify.bounds)
    for rule in recipe.rules:
        if rule.replace != AS_STORED:
            rules.append(rule)
            continue
        made = list(_rules(rule, file.sites))
        bound = bounds.pop(rule.name, None)
        bounds |= {} if bound is None else {one.name: bound for one in made}
        rules += made
    return replace(recipe, rules=tuple(rules), verify=replace(recipe.verify, bounds=bounds))


def load(name: str, recipe: Recipe, level: str, options: Mapping[str, Any]) -> Loaded:
    """Load a GGUF file with its weights in the formats that they have there. level: how much is verified. options:
    those of models.load.load."""
    path = loading.gguf_file(name, options["progress"])
    if path is None:
        raise LoadError(f"recipe {recipe.name} holds weights as a GGUF file has them, and {name} is none: give a .gguf "
                        "file, a folder with one, or another recipe")  # fmt: skip
    file, source = open_gguf(path), resolve(name)
    config = AccelpatchConfig(recipe_of(recipe, file), progress=options["progress"], verify=level)
    config.stored = file.saved
    place = name if source.kind == "gguf" else str(path.parent)  # of the embedded model: a folder of the cache
    return replace(loading.load(place, **options, quantization=config, floats=file.floats()), source=source)


def _rules(rule: Rule, sites: Mapping[str, Form]) -> Iterator[Rule]:
    forms: dict[Form, list[str]] = {}
    wanted = {path: taken for path, taken in sites.items() if rule.match.fits_name(path)}
    for name, taken in _globs(wanted, sites).items():
        forms.setdefault(taken, []).append(name)
    for (replacer, form), names in forms.items():
        label = form.lower() if replacer != BLOCKS else f"{form.lower()}-blocks"
        yield replace(
            rule, match=replace(rule.match, name=tuple(names)), replace=replacer, options=_options(replacer, form),
            name=f"{rule.name}-{label}".removeprefix("-"), optional=True, otherwise="error",
        )  # fmt: skip


def _globs(wanted: Mapping[str, Form], sites: Mapping[str, Form]) -> dict[str, Form]:
    """The sites that are wanted, those of one name in all layers as one glob where all layers have one form and all are
    wanted: the recipe stays short."""
    kinds: dict[str, set[Form | None]] = {}
    for path in sites:
        if found := OF_LAYER.fullmatch(path):
            kinds.setdefault(found[1], set()).add(wanted.get(path))
    named = {}
    for path, form in wanted.items():
        found = OF_LAYER.fullmatch(path)
        named[f"model.layers.*.{found[1]}" if found and len(kinds[found[1]]) == 1 else path] = form
    return named


def _options(replacer: str, form: str) -> dict[str, Any]:
    if replacer == BLOCKS:
        return {"form": form}
    if replacer == "int8_weight_only":
        return {"group_size": GROUP, "half_scales": True}
    return {"group_size": [GROUP], "symmetric": form == "Q4_0"}
