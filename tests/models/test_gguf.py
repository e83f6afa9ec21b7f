"""GGUF files: unpacked to plain floats, refused when damaged."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest
import torch

from accelpatch.errors import LoadError
from accelpatch.models import load

IDS = torch.arange(1, 13)[None]


@pytest.mark.smoke
def test_gguf_is_unpacked_to_plain_floats(gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load.load(str(gguf_file), dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert loaded.source.kind == "gguf"
    assert loaded.tokenizer is not None
    assert type(loaded.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    stored = next(tensor for tensor in gguf.GGUFReader(gguf_file).tensors if tensor.name == "blk.0.ffn_up.weight")
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(loaded.model.model.layers[0].mlp.up_proj.weight, expected)
    loaded.model.save_pretrained(tmp_path / "saved")
    again = load.load(str(tmp_path / "saved")).model
    assert torch.equal(again(IDS).logits, loaded.model(IDS).logits)
    assert load.from_config(str(gguf_file)).config.num_hidden_layers == 1


@pytest.mark.parametrize("kept", [0, 0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.9999], ids=str)
def test_truncated_gguf(gguf_file: Path, kept: float) -> None:
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(LoadError, match=re.escape(str(gguf_file))):
        load.load(str(gguf_file))


def test_file_that_is_only_called_gguf(gguf_file: Path) -> None:
    gguf_file.write_bytes(b"x" * 10_000)
    with pytest.raises(LoadError, match="does not begin as a GGUF file does"):
        load.load(str(gguf_file))
