"""Saved patched models as GGUF files: what llama.cpp wrote comes back byte by byte, and others with their own codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import accelpatch
from accelpatch.errors import SaveError
from accelpatch.recipe.recipe import parse
from tests.support.exports import saved
from tests.support.foreign import ROOT

IDS = torch.arange(1, 13)[None]
INT8 = parse("{name: q8, extends: int8, rules: [{name: linear, options: {group_size: 32, half_scales: true}}]}")
SYMMETRIC = "{name: q4, extends: int4, rules: [{name: linear, options: {group_size: [32], symmetric: true}}]}"


@pytest.mark.parametrize("name", ["gguf-q4_k_m", "gguf-q4_0-q4_1-q8_0"])
@torch.no_grad()
def test_what_llama_cpp_wrote_comes_back(name: str, tmp_path: Path) -> None:
    file = ROOT / name / "model.gguf"
    model: Any = accelpatch.load(str(file), "gguf", dtype=torch.float32).model
    model.save_pretrained(tmp_path / "ours")
    made = accelpatch.export(tmp_path / "ours", "gguf", tmp_path / "made")
    assert made.format == "gguf"
    due = {one.name: one for one in gguf.GGUFReader(file).tensors}
    held = {one.name: one for one in gguf.GGUFReader(tmp_path / "made/model.gguf").tensors}
    assert held.keys() == due.keys()
    for key, one in held.items():
        assert (one.tensor_type, one.data.tobytes()) == (due[key].tensor_type, due[key].data.tobytes()), key
    again: Any = accelpatch.load(str(tmp_path / "made/model.gguf"), "gguf", dtype=torch.float32).model
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recipe", [INT8, "int4", parse(SYMMETRIC)], ids=["Q8_0", "Q4_1", "Q4_0"])
@torch.no_grad()
def test_codes_are_kept(name: str, recipe: Any, tmp_path: Path) -> None:
    folder = saved(recipe, tmp_path / "ours", name)
    accelpatch.export(folder, "gguf", tmp_path / "made")
    model: Any = accelpatch.load(str(folder), dtype=torch.float32).model
    own: Any = accelpatch.load(str(tmp_path / "made"), dtype=torch.float32).model  # unpacked by transformers
    away = (own(IDS).logits - model(IDS).logits).abs().max()
    assert away < 1e-3 * model(IDS).logits.abs().max()  # int8 heads' scales are rounded to float16
    held: Any = accelpatch.load(str(tmp_path / "made"), "gguf", dtype=torch.float32).model
    torch.testing.assert_close(held(IDS).logits, own(IDS).logits, rtol=0, atol=1e-4)


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    for name, recipe, message in (
        ("gemma2", "int8", "a model of type gemma2 is not written as GGUF"),
        ("llama", "fp8", "is replaced by w8a8_fp8, which GGUF does not hold"),
    ):
        folder = saved(recipe, tmp_path / name, name)
        with pytest.raises(SaveError, match=message):
            accelpatch.export(folder, "gguf", tmp_path / "made")
        assert not (tmp_path / "made").exists()


def test_scaled_rotary_frequencies_are_refused(tmp_path: Path) -> None:
    folder = saved("int8", tmp_path / "ours")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SaveError, match="rotary frequencies of the type yarn"):
        accelpatch.export(folder, "gguf", tmp_path / "made")
