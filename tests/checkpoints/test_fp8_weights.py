"""Weights in 8-bit floats with float activations: exported, read back; codes that are NaN and tensors that lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import LoadError
from accelpatch.recipe.recipe import parse
from tests.checkpoints.test_damaged import _with as with_changes
from tests.support.tiny import CAUSAL, full_batch

Q_PROJ = "model.layers.1.self_attn.q_proj"
RULES = "rules: [{{name: linear, replace: {}, options: {{}}}}, {{name: head, replace: keep}}]"


def saved(folder: Path, replacer: str) -> Any:
    """A small model with its inner linear layers in a format, saved as accelpatch's own."""
    model: Any = CAUSAL["qwen2"].make()
    accelpatch.patch(model, parse("{name: floats, extends: int8, " + RULES.format(replacer) + "}"), verify=False)
    model.save_pretrained(folder)
    return model


def test_what_is_exported_is_read_back(tmp_path: Path) -> None:
    model, ids = saved(tmp_path / "ours", "fp8_weight_only"), full_batch()["input_ids"]
    assert accelpatch.export(tmp_path / "ours", "compressed-tensors", tmp_path / "theirs").format == "float-quantized"
    groups = json.loads((tmp_path / "theirs/config.json").read_text())["quantization_config"]["config_groups"]
    assert [one["input_activations"] for one in groups.values()] == [None]
    again: Any = accelpatch.load(str(tmp_path / "theirs"), dtype=torch.float32).model
    sites = {site.path: site.replacer for site in again.accelpatch.report().sites}
    assert sites[Q_PROJ] == "fp8_weight_only"
    assert torch.equal(
        torch.as_tensor(again.get_submodule(Q_PROJ).weight), torch.as_tensor(model.get_submodule(Q_PROJ).weight)
    )
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_a_code_that_is_nan_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "fp8_blocks")
    with_changes(tmp_path, lambda held: held[f"{Q_PROJ}.q"].view(torch.uint8)[3, 5].fill_(0xFF))
    with pytest.raises(LoadError, match=rf"model.safetensors: {Q_PROJ}.q has NaN: write the checkpoint again"):
        accelpatch.load(str(tmp_path))


@pytest.mark.parametrize("part", ["q", "scale"])
@pytest.mark.parametrize("replacer", ["fp8_blocks", "int8_weight_only"])
def test_a_missing_tensor_is_named_with_its_file(replacer: str, part: str, tmp_path: Path) -> None:
    saved(tmp_path, replacer)
    with_changes(tmp_path, lambda held: held.pop(f"{Q_PROJ}.{part}"))
    with pytest.raises(LoadError, match=rf"model.safetensors: the checkpoint lacks {Q_PROJ}.{part}, a part"):
        accelpatch.load(str(tmp_path))
