"""Checkpoints that others wrote and accelpatch loads as they are: which layout one has, and what it holds.

Their layouts: models/foreign_layouts.py, and one without quantization_config: mit-han-lab's int8 OPT
(modules/int8_opt.py), each of whose decoder layers has its tensors under its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from accelpatch.checkpoints.inspection import OF_OPT
from accelpatch.checkpoints.save import description
from accelpatch.errors import LoadError
from accelpatch.models import checkpoint, unread
from accelpatch.models.catalog import resolve
from accelpatch.models.foreign_layouts import INTEGERS, LAYOUTS, METHODS, ForeignLayout
from accelpatch.quant.each_expert import each_expert
from accelpatch.recipe import recipe as recipes

SMOOTHQUANT_OPT = "smoothquant-opt"  # the name of its recipe too
EXPERTS = re.compile(r"\bexperts(\.|$)")  # of which models hold all in one
EACH = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|down)_proj")  # a layer of one of them
LAYER = re.compile(r"(.*\blayers\.\d+)\..+\.[ab]$")  # by the factors, which no float layer has


@dataclass(frozen=True)
class Packed:
    """How a checkpoint has a layer: its tensors, and what makes the canonical weight of them, the layout's arguments
    and the layer's sizes. experts: what makes the tensors of all experts of an MLP, of those of their own layers."""

    parts: tuple[str, ...]
    weight: Callable[[Mapping[str, Any], Mapping[str, Any], int, int], Any]
    experts: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None


def packed(layout: Mapping[str, Any]) -> Packed | None:
    """How the checkpoints of a layout have a layer; None for SmoothQuant's OPT, whose layers are saved as ours are."""
    if layout["name"] == SMOOTHQUANT_OPT:
        return None
    record = LAYOUTS[layout["name"]]
    module, _, function = record.reader.partition(".")
    reader = getattr(import_module(f"accelpatch.quant.{module}"), function)
    return Packed(record.parts, reader, partial(each_expert, reader) if record.of_each else None)


def layout_of(name: str) -> dict[str, Any] | None:
    """The layout of a model by name, where it is a folder in one of these: its name and arguments; None for others.

    Raises LoadError for what config.json says of it and no reader knows.
    """
    source = resolve(name)
    folder = Path(source.location)
    if source.kind != "folder" or not (folder / "config.json").is_file():
        return None
    config = checkpoint.read_json(folder / "config.json")
    method = checkpoint.quantization_method(config)
    if method in METHODS:
        return _arguments(folder / "config.json", str(method), checkpoint.quantization_of(config))
    if config.get("model_type") != "opt" or method is not None:
        return None
    names = (one for file in checkpoint.shard_names(folder) for one in checkpoint.header(folder / file)[1])
    return {"name": SMOOTHQUANT_OPT} if any(one.endswith(OF_OPT) for one in names) else None


def _arguments(place: Path, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The name of a layout, and what its reader needs of quantization_config."""
    if why := unread.reason(given):
        raise LoadError(f"{place}: {why}")
    if method == "bitsandbytes":
        four, kind = bool(given.get("load_in_4bit")), str(given.get("bnb_4bit_quant_type", "fp4"))
        if four == bool(given.get("load_in_8bit")) or (four and kind not in ("nf4", "fp4")):
            raise LoadError(f"{place}: bitsandbytes is read with load_in_4bit (nf4 or fp4) or load_in_8bit, not {kind}")
        return {"name": "bitsandbytes-4bit", "type": kind} if four else {"name": "bitsandbytes-8bit"}
    if method != "compressed-tensors":
        keys = ("bits", "group_size", "sym", "checkpoint_format", "format", "version")
        return {"name": method, **{key: given[key] for key in keys if key in given}}
    name, kinds = str(given["format"]), [one for one in given["config_groups"].values() if isinstance(one, dict)]
    if name == "pack-quantized":
        weights = kinds[0]["weights"]
        group = weights.get("group_size") if weights.get("strategy") != "channel" else -1
        sym = bool(weights.get("symmetric", True))
        return {"name": name, "bits": weights["num_bits"], "group_size": group, "sym": sym}
    inputs = kinds[0].get("input_activations")
    if name == "float-quantized":
        return {"name": name, "replacer": "w8a8_fp8" if isinstance(inputs, dict) else "fp8_weight_only"}
    return {"name": name, **({"static": inputs.get("dynamic") is False} if isinstance(inputs, dict) else {})}


def described(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config that a checkpoint in a layout would have, had accelpatch written it."""
    name = layout["name"]
    recipe = recipes.load(SMOOTHQUANT_OPT) if name == SMOOTHQUANT_OPT else recipes.parse(_recipe(layout), source=name)
    return description(recipe) | {"layout": dict(layout)}


def _recipe(layout: Mapping[str, Any]) -> str:
    """The recipe by which such a checkpoint is patched: what it holds quantised, and `exact` for the rest."""
    made = LAYOUTS[layout["name"]]
    role = "experts" if made.experts else "linear"
    replacer = f"{layout['type']}_weight_only" if "type" in layout else next(iter(_marks(layout).values()))
    rule = {"name": role, "match": {"role": role}, "replace": replacer, "options": _options(layout, made)}
    rule = {key: value for key, value in rule.items() if value != {}}
    more = {"name": "experts", "match": {"role": "experts"}, "replace": made.of_each, "optional": True}
    rules = [rule, more] if made.of_each else [rule]
    return json.dumps({"name": layout["name"], "extends": "exact", "rules": rules})  # which is YAML


def _options(layout: Mapping[str, Any], made: ForeignLayout) -> dict[str, Any]:
    """The options of its replacer."""
    if layout["name"] == "int-quantized":
        return {"activations": "static" if layout["static"] else "dynamic"}
    if layout["name"] == "bitsandbytes-8bit":
        return {"group_size": None}
    if layout["name"] == "bitsandbytes-4bit":  # blocks go on from row to row where K is no multiple of them
        return {"group_size": [64, 32, 16, 8, 4, 2]}
    if INTEGERS not in made.marks.values():
        return {}
    bits, group = layout.get("bits"), layout.get("group_size", 128)
    known = (3, 4, 8) if layout["name"] == "gptq" else (4, 8)
    if bits not in known or type(group) is not int or group == 0 or group < -1:
        raise LoadError(f"{layout['name']} with bits {bits!r} and group_size {group!r} is not read: {unread.FLOAT}")
    size = None if group == -1 else group
    if bits == 8:
        return {"group_size": size}
    symmetric = bool(layout.get("sym", True)) and layout["name"] != "awq"
    return {"group_size": [size], **({"symmetric": True} if symmetric else {"zero_point": True})}


def _marks(layout: Mapping[str, Any]) -> dict[str, str]:
    """A tensor that shows that a layer is quantised -> its replacer's name."""
    return {mark: name.format(**{"bits": None, **layout}) for mark, name in LAYOUTS[layout["name"]].marks.items()}


def sites_of(layout: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Dotted path of a quantised module -> its replacer's name, by the names of a checkpoint's tensors."""
    if layout["name"] == SMOOTHQUANT_OPT:
        layers = (LAYER.match(name) for name in names)
        return {found.group(1): "int8_opt" for found in layers if found is not None}
    made, marks = LAYOUTS[layout["name"]], _marks(layout)
    found = {
        name.removesuffix(f".{mark}"): replacer
        for name in names
        for mark, replacer in marks.items()
        if name.endswith(f".{mark}")
    }
    if made.of_each:
        experts = {path: each for path in found if (each := EACH.fullmatch(path)) is not None}
        found = {path: name for path, name in found.items() if path not in experts}
        found |= dict.fromkeys((each.group(1) for each in experts.values()), made.of_each)
    outside = (path for path, name in found.items() if not made.experts and name != made.of_each)
    inside = next((path for path in outside if EXPERTS.search(path)), None)
    if inside is not None:
        name = layout["name"]
        raise LoadError(f"the checkpoint has quantised experts ({inside}), and {name} is read of linear layers outside "
                        f"of them alone; {made.library} reads it, or {unread.FLOAT}")  # fmt: skip
    if not found:
        mark = " or ".join(marks)
        raise LoadError(f"config.json says {layout['name']}, and there is no {mark} of a layer: fetch both again")
    return found
