"""Saved checkpoints to load, damage and distrust."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import LlamaForCausalLM


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


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
    writer.add_token_list(["w", "1", "2", *(f"w{index}" for index in range(125))])
    writer.add_token_merges(["w 1", "w 2"])  # 5.10 cannot read a list of one
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
