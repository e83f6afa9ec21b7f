"""The checkpoints that others' tools wrote: complete, readable, small, and described on their page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

FOREIGN = Path(__file__).parent / "fixtures/foreign"
FOLDERS = sorted(path for path in FOREIGN.iterdir() if path.is_dir())
BYTES = 1_400_000
METHODS = {"gptq": "gptq", "awq": "awq", "bnb": "bitsandbytes", "ct": "compressed-tensors", "gpt": "mxfp4",
           "modelopt": "modelopt"}  # fmt: skip


def test_size() -> None:
    assert sum(path.stat().st_size for path in FOREIGN.rglob("*") if path.is_file()) < BYTES


def test_readme_names_each() -> None:
    rows = [
        line.split("|")[1].strip(" `") for line in (FOREIGN / "README.md").read_text().splitlines() if "kB |" in line
    ]
    assert sorted(rows) == [path.name for path in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_expected(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    assert expected.pop("input_ids").shape == (1, 8)
    assert expected["logits"].dtype == torch.float32
    assert expected["logits"].shape == (8, 32)
    assert any(name.endswith(".weight") for name in expected)
    assert all(tensor.isfinite().all() for tensor in expected.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_checkpoint(folder: Path) -> None:
    tool = folder.name.partition("-")[0]
    if tool == "gguf":
        assert {tensor.name for tensor in GGUFReader(folder / "model.gguf").tensors} >= {"token_embd.weight"}
        return
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == METHODS[tool]
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert sum(name.startswith("model.layers.0.self_attn.k_proj.") for name in tensors) >= 2
