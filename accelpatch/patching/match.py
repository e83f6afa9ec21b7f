"""Walks a model's module tree to find its sites, and matches the rules of a recipe to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.patching.site import Site
from accelpatch.patching.stored import StoredOf, none_stored
from accelpatch.patching.towers import tower_lookup
from accelpatch.recipe.recipe import Match, Recipe, Rule

ATTENTION = "attention"  # role of modules that compute attention, not of modules that wrap such a one
# Suffix of the class name -> role, for modules that the family's table does not name.
CLASS_ROLES = (
    ("RMSNorm", "norm"),
    ("LayerNorm", "norm"),
    ("RotaryEmbedding", "rotary"),
    ("Experts", "experts"),
    ("Router", "router"),
    ("Attention", ATTENTION),
)

NO_TIES: Mapping[str, str] = MappingProxyType({})


def sites(
    model: nn.Module, roles: Mapping[str, str], stored_of: StoredOf = none_stored, ties: Mapping[str, str] = NO_TIES
) -> list[Site]:
    """Every module of `model` that owns parameters or has a role, in the order of the tree.

    roles: the model family's table, glob over dotted names (numbers written `#`) -> role. stored_of: describes a module
    whose weight another library quantised, and gives None for all others; such modules have the roles of float linear
    layers. ties: pairs of names of parameters that are one weight, for weights on the meta device. Modules that share a
    weight become one site, with the others in `tied`; the head comes first, since its linear layer decides the format.
    A module that a PEFT adapter wraps has the role that it would have alone; the adapter's own weights have none.
    """
    own_code.look_at(model.modules())
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    named, share = list(model.named_modules(remove_duplicate=False)), active_share(model)
    for path, module in named:
        paths.setdefault(id(module), []).append(path)
        modules[id(module)] = module
    head = wrapped(getattr(model, "get_output_embeddings", lambda: None)())
    adapters = {path: inner for path, module in named if (inner := inner_name(module)) is not None}
    changed = _adapted(module for _, module in named)
    counted, found = set[int](), dict[int, Site]()
    dtype = _dtype_of(model)
    for key, module in modules.items():
        path = path_without_wrappers(adapters, paths[key][0])
        role = role_of(path, module, roles, head) if path and module is not model else "other"
        own = [p for p in module._parameters.values() if p is not None]
        stored = None if inner_name(module) else stored_of(module)
        if stored is not None:
            role = "linear" if role == "other" and path else role
            facts: Any = {"n": stored.n, "k": stored.k, "bytes": stored.bytes, "token_bytes": stored.bytes}
            site = _site(paths[key], module, role, [], share, counted)
            found[key] = replace(site, **facts, dtype=dtype, stored=stored)
        elif own or role != "other":
            found[key] = _site(paths[key], module, role, own, share, counted)
        if key in found and key in changed:
            found[key] = replace(found[key], adapted=tuple(changed[key]))
    tower_at, joined = tower_lookup(model), _join_tied(list(found.values()), ties)
    return [replace(site, model=model, tower=tower_at(site.path)) for site in joined]


def inner_name(module: nn.Module) -> str | None:
    """The name of the child that a PEFT module wraps: an adapter's base layer, or the original of a module in PEFT's
    `modules_to_save`. None for any other module."""
    if not hasattr(type(module), "adapter_layer_names"):
        return None
    return next((name for name in ("base_layer", "original_module") if name in module._modules), None)


def _adapted(modules: Iterable[nn.Module]) -> dict[int, list[str]]:
    """id of a module -> names of its parameters that PEFT parametrizes during each call."""
    found: dict[int, list[str]] = {}
    for module in modules:
        name = vars(module).get("parameter_name")
        if name is not None and inner_name(module) is not None:
            found.setdefault(id(wrapped(module)), []).append(name)
    return found


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PeftModel, or inside a model of sentence-transformers that has one; any other
    model itself."""
    classes = type(model).__mro__
    if any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in classes):
        return model.get_base_model()
    if any(cls.__module__.startswith("sentence_transformers.") for cls in classes):
        inside = [one for one in model.modules() if any(cls.__name__ == "PreTrainedModel" for cls in type(one).__mro__)]
        within = {id(part) for one in inside for part in one.modules() if part is not one}
        outermost = [one for one in inside if id(one) not in within]
        return outermost[0] if len(outermost) == 1 else model
    return model


def wrapped(module: nn.Module | None) -> nn.Module | None:
    """The module inside any PEFT wrappers; any other module itself."""
    while module is not None and (name := inner_name(module)) is not None:
        module = module._modules[name]
    return module


def path_without_wrappers(adapters: Mapping[str, str], path: str) -> str:
    """The path that a module would have without PEFT wrappers; "" for a wrapper itself and for an adapter's modules.

    adapters: path of each wrapper -> name of the child that it wraps.
    """
    parts, kept = path.split("."), list[str]()
    inner: str | None = None
    for place, part in enumerate(parts):
        if inner is not None and part != inner:
            return ""
        if inner is None:
            kept.append(part)
        inner = adapters.get(".".join(parts[: place + 1]))
    return "" if inner is not None else ".".join(kept)


def text_config(model: nn.Module) -> Any:
    """The configuration of the model's language part, or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def active_share(model: nn.Module) -> float:
    """Share of a mixture-of-experts model's expert weights that one token reads: experts per token / experts."""
    text = text_config(model)
    chosen = getattr(text, "num_experts_per_tok", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return min(1.0, chosen / experts) if chosen and experts else 1.0


def role_of(path: str, module: nn.Module, roles: Mapping[str, str], head: nn.Module | None) -> str:
    """The role of one module: "head" for the model's head, else by the family's table, else by its class."""
    if module is head:
        return "head"
    numberless = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", path)
    for pattern, role in roles.items():
        if fnmatchcase(numberless, pattern):
            return role
    stacks = [p for p in module._parameters.values() if p is not None and p.dim() == 3 and p.shape[0] > 1]
    if stacks and not isinstance(
        module, nn.modules.conv._ConvNd
    ):  # a [1, ...] parameter is a class token or a position table
        return "experts"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return "linear"
    name = own_code.base_of(type(module)).__name__
    role = next((role for end, role in CLASS_ROLES if name.endswith(end)), "other")
    wraps_attention = any(type(child).__name__.endswith("Attention") for child in module.children())
    return "other" if role == ATTENTION and wraps_attention else role


def _site(
    paths: list[str], module: nn.Module, role: str, own: list[nn.Parameter], share: float, counted: set[int]
) -> Site:
    """The Site of one module; parameters that another site owns already are not counted again."""
    fresh = [p for p in own if id(p) not in counted]
    counted.update(id(p) for p in own)
    size = sum(p.numel() * p.element_size() for p in fresh)
    n, k = _shape(module)
    weight = module._parameters.get("weight")
    token = size
    if isinstance(module, nn.Embedding) and weight is not None:
        token = weight.shape[1] * weight.element_size()  # one row
    elif role == "experts":
        token = round(size * share)
    names = tuple(cls.__name__ for cls in type(module).__mro__ if cls is not object)
    dtype = str(own[0].dtype).removeprefix("torch.") if own else ""
    return Site(paths[0], module, role, names, n, k, size, token, dtype, tuple(paths))


def _dtype_of(model: nn.Module) -> str:
    """The dtype that a model computes in: that of its first float parameter of more than 8 bits."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    return str(next(dtypes, torch.float32)).removeprefix("torch.")


def _shape(module: nn.Module) -> tuple[int | None, int | None]:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None, None
    rows, columns = weight.shape
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def _join_tied(found: list[Site], ties: Mapping[str, str]) -> list[Site]:
    """Merge sites whose modules share a weight. ties: as in `sites`."""
    groups: dict[Any, list[Site]] = {}
    for site in found:
        weight = site.original._parameters.get("weight")
        key: Any = id(weight) if weight is not None else -id(site)
        if weight is not None and weight.is_meta and ties:
            name = f"{site.path}.weight"
            key = ties.get(name, name)
        groups.setdefault(key, []).append(site)
    joined = []
    for group in groups.values():
        if len(group) == 1:
            joined.append(group[0])
            continue
        first, *others = sorted(group, key=lambda site: site.role != "head")
        # Tied by name only: each site has counted the bytes of its own tensor, though they are one weight.
        by_name = len({id(site.original._parameters.get("weight")) for site in group}) > 1
        owned = first.bytes if by_name else sum(site.bytes for site in group)
        read = owned if first.role == "head" else first.token_bytes
        row = next((site.token_bytes for site in others if site.role == "embedding"), 0)
        names = first.class_names
        joined.append(
            Site(
                first.path, first.module, first.role, names, first.n, first.k, owned, read + row,
                first.dtype, first.own_paths, tuple(others),
            )
        )  # fmt: skip
    return joined


def rule_for(site: Site, recipe: Recipe) -> Rule | None:
    """The first rule of `recipe` that matches `site`, or None."""
    return next((rule for rule in recipe.rules if matches(site, rule.match)), None)


def matches(site: Site, match: Match) -> bool:
    """Whether `site` meets every condition in `match`."""
    if match.role and not site.roles.intersection(match.role):
        return False
    if match.cls and not set(match.cls).intersection(site.class_names):
        return False
    if not any(match.fits_name(path) for path in site.paths):
        return False
    bounds = match.shape
    for axis, size in (("n", site.n), ("k", site.k)):
        low, high = bounds.get(f"min_{axis}"), bounds.get(f"max_{axis}")
        if (low is not None or high is not None) and size is None:
            return False
        if size is not None and not (low or 0) <= size <= (high if high is not None else size):
            return False
    return True
