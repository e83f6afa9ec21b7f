"""Layouts of checkpoints that others wrote and accelpatch loads as they are: how one is recognised, and what it holds.

smoothquant-opt    mit-han-lab's int8 OPT (modules/int8_opt.py): each decoder layer's tensors under its name
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from accelpatch.checkpoints.inspection import OF_OPT
from accelpatch.checkpoints.save import description
from accelpatch.errors import LoadError
from accelpatch.models import checkpoint
from accelpatch.models.catalog import resolve
from accelpatch.recipe import recipe as recipes

SMOOTHQUANT_OPT = "smoothquant-opt"  # the name of its recipe too
LAYER = re.compile(r"(.*\blayers\.\d+)\..+\.[ab]$")  # by the factors, which no float layer has


def layout_of(name: str) -> str | None:
    """The layout of a model by name, where it is a folder in one of these; None for all others."""
    source = resolve(name)
    folder = Path(source.location)
    if source.kind != "folder" or not (folder / "config.json").is_file():
        return None
    config = checkpoint.read_json(folder / "config.json")
    if config.get("model_type") != "opt" or checkpoint.quantization_method(config) is not None:
        return None
    names = (one for file in checkpoint.shard_names(folder) for one in _names(folder / file))
    return SMOOTHQUANT_OPT if any(one.endswith(OF_OPT) for one in names) else None


def described(layout: str) -> dict[str, Any]:
    """The quantization_config that a checkpoint in a layout would have, had accelpatch written it."""
    return description(recipes.load(layout)) | {"layout": layout}


def sites_of(layout: str, names: Iterable[str]) -> dict[str, str]:
    """Dotted path of a quantised module -> its replacer's name, by the names of a checkpoint's tensors."""
    if layout != SMOOTHQUANT_OPT:
        raise LoadError(f"there is no layout {layout!r}: known is {SMOOTHQUANT_OPT}")
    layers = (LAYER.match(name) for name in names)
    return {found.group(1): "int8_opt" for found in layers if found is not None}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} is truncated or damaged ({error}): fetch it again") from error
