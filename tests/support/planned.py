"""Tiny models without a row in the family table, which are split among ranks by their tp_plan."""

from __future__ import annotations

from typing import Any

import torch
import transformers

#: the prefixes of their classes
PLANNED = ("Arcee", "SeedOss", "Exaone4", "Cwm", "NanoChat", "Apertus")


def planned(name: str) -> Any:
    """A tiny model that only its tp_plan says how to split."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def with_plan(model: Any, changes: dict[str, str]) -> Any:
    """The model with changes to its class's plan; an empty one takes an entry out."""
    plan = {**planned("SeedOss")._tp_plan, **changes}
    model._tp_plan = {key: kind for key, kind in plan.items() if kind}
    return model


#: case -> changes to a tp_plan that make it one that is refused
_MLP = "model.layers.*.mlp."
PLANS: dict[str, dict[str, str]] = {
    "unknown": {_MLP + "up_proj": "sequence_parallel"},
    "module": {"model.layers.*.input_layernorm": "colwise"},
    "alone": {_MLP + "down_proj": ""},
    "parameters": {_MLP + "up_proj.weight": "packed_colwise"},
}
