"""Layouts of checkpoints that others wrote and accelpatch loads as they are: how one is recognised, and what it holds.

    smoothquant-opt      mit-han-lab's int8 OPT (modules/int8_opt.py): each decoder layer's tensors under its name
    gptq, awq            linear layers of 4 bits (gptq: 8 too), as GPTQModel and AutoAWQ write them
    bitsandbytes         linear layers in nf4, fp4 or LLM.int8()
    compressed-tensors   the same, pack-quantized; int-quantized and float-quantized, whose activations have 8 bits too

Of the last four each linear layer has the tensors of quant/packed_formats.py or bitsandbytes_formats.py; all else is
float under the family's names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.checkpoints.inspection import OF_OPT
from accelpatch.checkpoints.save import description
from accelpatch.errors import LoadError
from accelpatch.models import checkpoint, unread
from accelpatch.models.catalog import resolve
from accelpatch.quant import bitsandbytes_formats, packed_formats
from accelpatch.recipe import recipe as recipes

SMOOTHQUANT_OPT = "smoothquant-opt"  # the name of its recipe too
EXPERTS = re.compile(r"\bexperts(\.|$)")  # of which models hold all in one
LAYER = re.compile(r"(.*\blayers\.\d+)\..+\.[ab]$")  # by the factors, which no float layer has


@dataclass(frozen=True)
class Packed:
    """How a layout has a linear layer: its tensors, and their reader.

    marks: the tensors that show that it is quantised, each with its replacer; none: the first, with the layout's.
    """

    parts: tuple[str, ...]
    weight: Callable[[Mapping[str, Any], Mapping[str, Any], int, int], Any]
    marks: Mapping[str, str] = field(default_factory=dict)


ROWS = Packed(("weight_scale", "weight", "input_scale", "input_zero_point"), packed_formats.rows)
PACKED: Mapping[str, Packed] = {
    "gptq": Packed(("qweight", "qzeros", "scales", "g_idx"), packed_formats.gptq),
    "awq": Packed(("qweight", "qzeros", "scales"), packed_formats.awq),
    "bitsandbytes-4bit": Packed(
        bitsandbytes_formats.FOUR_BITS,
        bitsandbytes_formats.four_bits,
        {state: f"{name}_weight_only" for name, state in bitsandbytes_formats.STATES.items()},
    ),
    "bitsandbytes-8bit": Packed(
        bitsandbytes_formats.EIGHT_BITS, bitsandbytes_formats.int8, {"SCB": "int8_weight_only"}
    ),
    "int-quantized": ROWS,
    "float-quantized": ROWS,
    "pack-quantized": Packed(
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"), packed_formats.packed
    ),
}


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
    if method in checkpoint.READ:
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
        if four == bool(given.get("load_in_8bit")) or (four and kind not in bitsandbytes_formats.STATES):
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
    return {"name": name, "static": dict(kinds[0]["input_activations"]).get("dynamic") is False}


def described(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config that a checkpoint in a layout would have, had accelpatch written it."""
    name = layout["name"]
    recipe = recipes.load(SMOOTHQUANT_OPT) if name == SMOOTHQUANT_OPT else recipes.parse(_recipe(layout), source=name)
    return description(recipe) | {"layout": dict(layout)}


def _recipe(layout: Mapping[str, Any]) -> str:
    """The recipe by which such a checkpoint is patched: what it holds quantised, and `exact` for the rest."""
    if PACKED[layout["name"]] is ROWS:
        ints = {"activations": "static" if layout["static"] else "dynamic"}
        return _by(layout, *(("w8a8", ints) if layout["name"] == "int-quantized" else ("w8a8_fp8", {})))
    if layout["name"] == "bitsandbytes-8bit":
        return _by(layout, "int8_weight_only", {"group_size": None})
    if layout["name"] == "bitsandbytes-4bit":  # blocks go on from row to row where K is no multiple of them
        return _by(layout, f"{layout['type']}_weight_only", {"group_size": [64, 32, 16, 8, 4, 2]})
    bits, group = layout.get("bits"), layout.get("group_size", 128)
    if bits not in (4, 8) or type(group) is not int or group == 0 or group < -1:
        raise LoadError(f"{layout['name']} with bits {bits!r} and group_size {group!r} is not read: {unread.FLOAT}")
    size = None if group == -1 else group
    options: dict[str, Any] = {"group_size": size}
    if bits == 4:
        symmetric = bool(layout.get("sym", True)) and layout["name"] != "awq"
        options = {"group_size": [size], **({"symmetric": True} if symmetric else {"zero_point": True})}
    return _by(layout, f"int{bits}_weight_only", options)


def _by(layout: Mapping[str, Any], replacer: str, options: Mapping[str, Any]) -> str:
    rule = {"name": "linear", "match": {"role": "linear"}, "replace": replacer, "options": dict(options)}
    rule = {key: value for key, value in rule.items() if value != {}}
    made = {"name": layout["name"], "extends": "exact", "rules": [rule]}
    return json.dumps(made)  # which is YAML


def sites_of(layout: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Dotted path of a quantised module -> its replacer's name, by the names of a checkpoint's tensors."""
    if layout["name"] == SMOOTHQUANT_OPT:
        layers = (LAYER.match(name) for name in names)
        return {found.group(1): "int8_opt" for found in layers if found is not None}
    made = PACKED[layout["name"]]
    kinds = {"int-quantized": "w8a8", "float-quantized": "w8a8_fp8"}
    marks = made.marks or {made.parts[0]: kinds.get(layout["name"]) or f"int{layout.get('bits')}_weight_only"}
    found = {
        name.removesuffix(f".{mark}"): replacer
        for name in names
        for mark, replacer in marks.items()
        if name.endswith(f".{mark}")
    }
    if inside := next((path for path in found if EXPERTS.search(path)), None):
        name = layout["name"]
        raise LoadError(f"the checkpoint has quantised experts ({inside}), and {name} is read of linear layers outside "
                        f"of them alone; {unread.BY[name]} reads it, or {unread.FLOAT}")  # fmt: skip
    if not found:
        mark = " or ".join(marks)
        raise LoadError(
            f"config.json says {layout['name']}, and there is no {mark} of a linear layer: fetch both again"
        )
    return found
