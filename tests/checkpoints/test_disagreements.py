"""A configuration and weights that say different things: an error, or what the weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import LoadError
from tests.support.tiny import CAUSAL, full_batch


def untied() -> Any:
    """A model whose configuration still says that its embeddings are tied."""
    model = CAUSAL["llama"].make()
    assert model.config.tie_word_embeddings
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 2)
    return model


def saved(model: Any, folder: Path, **changes: Any) -> Path:
    """A float checkpoint with another configuration than its weights'."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_two_weights_where_the_configuration_says_one_are_refused(tmp_path: Path) -> None:
    folder = saved(untied(), tmp_path / "float", tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"ties lm_head and model\.embed_tokens, and the checkpoint has two weights"):
        accelpatch.load(str(folder), "int8")


def test_a_patched_model_with_two_weights_is_saved_as_such(tmp_path: Path) -> None:
    model = accelpatch.patch(untied(), "int8", verify=False)
    model.save_pretrained(tmp_path / "patched")
    again = accelpatch.load(str(tmp_path / "patched")).model
    with torch.no_grad():
        assert torch.equal(again(**full_batch()).logits, model(**full_batch()).logits)
    assert not again.config.tie_word_embeddings
    assert model.config.tie_word_embeddings  # as the user has it


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param({"num_key_value_heads": 4}, r"layers\.0\.self_attn\.k_proj\.weight", id="heads"),
        pytest.param({"vocab_size": 150}, r"model\.embed_tokens\.weight", id="vocabulary"),
        pytest.param({"intermediate_size": 128}, r"layers\.0\.mlp\.down_proj\.weight", id="width"),
    ],
)
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_other_shapes_are_named(recipe: str, changes: dict[str, int], name: str, tmp_path: Path) -> None:
    folder = saved(CAUSAL["llama"].make(), tmp_path / "float", **changes)
    with pytest.raises(LoadError, match=rf"config\.json and the weights disagree.*{name}"):
        accelpatch.load(str(folder), recipe)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_weight_that_lies_on_its_side_is_named(name: str, tmp_path: Path) -> None:
    model = CAUSAL[name].make()
    path = {"llama": "model.layers.0.mlp.down_proj", "gpt2": "transformer.h.0.mlp.c_fc"}[name]
    module: Any = model.get_submodule(path)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous())
    with pytest.raises(LoadError, match=rf"disagree: .*{path}\.weight"):
        accelpatch.load(str(saved(model, tmp_path / "float")), "int8")
