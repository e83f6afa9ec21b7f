"""PEFT on packed models: weights that are tied, layers that are frozen in part, and the names in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from tests.support.lora import peft
from tests.support.packed import patch, plain, replacements
from tests.support.tiny import CAUSAL, full_batch

forms = pytest.mark.parametrize("form", ["exact", "int8", "int4"])


def names(model: Any) -> list[str]:
    return sorted(name for name, p in model.named_parameters() if p.requires_grad)


def adapted(model: Any, **changes: Any) -> Any:
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**options | changes)).eval()


# options that PEFT reads the ties of a model for
TIED: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [3, 7]},
    "tokens-of-both": {"trainable_token_indices": {"embed_tokens": [3, 7]}, "ensure_weight_tying": True},
    "saved-head": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "target": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("case", TIED)
@forms
def test_a_tied_head_is_found(case: str, form: str) -> None:
    model, stock = (plain("llama", form, tie_word_embeddings=True) for _ in range(2))
    found, due = adapted(patch(model, form), **TIED[case]), adapted(stock, **TIED[case])
    assert names(found) == names(due)
    assert found(**full_batch()).logits.isfinite().all()
    accelpatch.unpatch(found)
    assert replacements(found) == []
    assert names(found) == names(due)


@forms
def test_what_peft_froze_in_part_comes_back_so(form: str) -> None:
    """`bias="all"` trains the biases alone: packed weights, which no list of parameters shows, come back frozen."""
    model, stock = (CAUSAL["qwen2"].make() for _ in range(2))
    found, due = adapted(patch(model, form), bias="all"), adapted(stock, bias="all")
    accelpatch.unpatch(found)
    assert names(found) == names(due)
    assert any(name.endswith("bias") for name in names(due))


@forms
def test_heads_and_tables_in_the_files_of_peft(form: str, tmp_path: Path) -> None:
    """PEFT keeps a resized table in its file: as a float under its own name, so that it loads without us."""
    changes: dict[str, Any] = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    model, stock = (plain("llama", form, tie_word_embeddings=False) for _ in range(2))
    found, due = adapted(patch(model, form), **changes), adapted(stock, **changes)
    states = []
    for folder, one in (("found", found), ("due", due)):
        one.save_pretrained(tmp_path / folder, save_embedding_layers=True)
        states.append(peft.utils.load_peft_weights(str(tmp_path / folder), device="cpu"))
    assert sorted(states[0]) == sorted(states[1])
    assert any("embed_tokens.base_layer.weight" in name for name in states[0])
    assert {value.dtype for value in states[0].values()} == {torch.float32}
