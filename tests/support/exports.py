"""Tiny saved patched models, by recipes that can be exported and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import accelpatch
from accelpatch.recipe.recipe import parse
from tests.support.smoothing import calibrated
from tests.support.tiny import CAUSAL

SYMMETRIC = parse("""name: int4-symmetric
extends: int4
rules:
  - name: linear
    options: {symmetric: true, group_size: [32]}
""")
BY_ROW = parse("""name: int8-rows
extends: int8
rules:
  - name: linear
    options: {group_size: null}
""")
FP8_WEIGHTS = parse("""name: fp8-weights
extends: int8
rules:
  - name: linear
    replace: fp8_weight_only
""")
MIXED = parse("""name: mixed
extends: int8
rules:
  - name: down
    match: {name: "*down_proj"}
    replace: int4_weight_only
    options: {group_size: [32], symmetric: true}
  - name: value
    match: {name: "*v_proj"}
    replace: keep
""")
KEPT = parse("""name: kept
extends: int4
rules:
  - name: value
    match: {name: "*v_proj"}
    replace: keep
  - name: linear
    options: {symmetric: true, group_size: [32]}
""")
RECIPES = {"int4 symmetric": SYMMETRIC, "int8 by row": BY_ROW, "fp8 weights": FP8_WEIGHTS, "mixed": MIXED, "kept": KEPT}


def saved(recipe: Any, folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A folder with a tiny model, patched by a recipe."""
    model: Any = CAUSAL[name].make(dtype)
    smooths = isinstance(recipe, str) and recipe.startswith("smoothquant")
    accelpatch.patch(model, recipe, verify=False, **({"statistics": calibrated(model)} if smooths else {}))
    model.save_pretrained(folder)
    return folder
