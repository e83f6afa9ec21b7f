"""GGUF files: unpacked to plain floats, refused when damaged."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from accelpatch.errors import LoadError
from accelpatch.models import load

IDS = torch.arange(1, 13)[None]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """One random Llama layer with a tokenizer of 128 words, all weights in Q8_0 or float32."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "1", *(f"w{index}" for index in range(126))])
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    matrices = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    matrices |= {"token_embd.weight": (128, 64), "output.weight": (128, 64)}
    random = np.random.default_rng(0)
    for name, shape in matrices.items():
        blocks = gguf.quantize(random.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
