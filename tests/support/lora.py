"""Tiny models with LoRA adapters by PEFT, which is an optional package: these tests need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.recipe.recipe import parse
from tests.support.tiny import CAUSAL, padded_batch

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'accelpatch[peft]'")

ROWS = "extends: {}\nrules:\n  - name: linear\n    replace: {}\n    options: {}\n"
RECIPES: dict[str, Any] = {
    "exact": "exact",
    "int8": parse(ROWS.format("int8", "int8_weight_only", "{group_size: null}")),
    "int4": parse(ROWS.format("int4", "int4_weight_only", "{group_size: 32, symmetric: false}")),
}


def config(rank: int = 4, **changes: Any) -> Any:
    options = {"r": rank, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**options | {"init_lora_weights": False} | changes)


def adapted(model: Any, seed: int = 1, **changes: Any) -> Any:
    """A PeftModel around `model`, its weights those of the seed and none of them zero."""
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config(**changes)).eval()


def both_orders(name: str, recipe: str, **changes: Any) -> tuple[Any, Any]:
    """The same model patched before and after it was adapted, each a PeftModel."""
    first = adapted(accelpatch.patch(CAUSAL[name].make(), RECIPES[recipe], verify=False), **changes)
    last = adapted(CAUSAL[name].make(), **changes)
    return first, accelpatch.patch(last, RECIPES[recipe], verify=False)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of the tokens of a padded batch that are shown, in float32."""
    batch = padded_batch()
    found: Tensor = model(**batch).logits[batch["attention_mask"].bool()].float()
    return found


def off(one: Tensor, other: Tensor) -> float:
    """Relative distance."""
    return float((one - other).norm() / other.norm())
