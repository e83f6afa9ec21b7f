"""GGUF's other types of blocks, and other architectures: values are those of gguf's own code, logits transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from accelpatch import api
from accelpatch.kernels.layouts.gguf_blocks import FORMS
from accelpatch.kernels.ops.linear import gguf_elements
from accelpatch.kernels.ops.linear.block_linear import random_blocks
from accelpatch.kernels.ops.linear.gguf_values import dequantize_rows
from tests.support.gguf_files import made, write

IDS = torch.arange(1, 13)[None]
OTHERS = [form for form in FORMS if form not in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")]
SHAPES = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
SHAPES |= {"ffn_gate": (256, 256), "ffn_up": (256, 256), "ffn_down": (256, 256)}


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_that_of_ggufs_own_code(form: str) -> None:
    blocks = random_blocks(torch.Generator().manual_seed(3), 9, 1024, form)
    due = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[form]))
    assert torch.equal(dequantize_rows(blocks, form, torch.float32), due)
    assert torch.equal(gguf_elements.dense(torch.float32, blocks, form), due)


def written(path: Path, form: str) -> Path:
    """One layer of an untied llama, all of its matrices in one type."""
    writer, generator = gguf.GGUFWriter(path, "llama"), torch.Generator().manual_seed(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(128)
    matrices = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    for name, (n, k) in (matrices | {"token_embd.weight": (128, 256), "output.weight": (128, 256)}).items():
        blocks = random_blocks(generator, n, k, form).numpy()
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[form])
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", OTHERS)
@torch.no_grad()
def test_a_file_is_held_as_it_is(tmp_path: Path, form: str) -> None:
    file = written(tmp_path / "made.gguf", form)
    own: Any = api.load(str(file), dtype=torch.float32).model
    held: Any = api.load(str(file), "gguf", dtype=torch.float32).model
    report = held.accelpatch.report()
    assert {site.replacer for site in report.sites if "proj" in site.path or site.path == "lm_head"} == {"gguf_blocks"}
    assert report.verification.failures == []
    torch.testing.assert_close(held(IDS).logits, own(IDS).logits, rtol=0, atol=1e-4)
    held.save_pretrained(tmp_path / "saved")
    again: Any = api.load(str(tmp_path / "saved"), dtype=torch.float32).model
    assert torch.equal(again(IDS).logits, held(IDS).logits)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3"])
@torch.no_grad()
def test_other_architectures(tmp_path: Path, name: str) -> None:
    due = made(name)
    keys: dict[str, Any] = {}
    if (width := getattr(due.config, "head_dim", None)) is not None:
        keys |= {"attention.key_length": width, "attention.value_length": width}
    if name == "phi3":
        keys["rope.dimension_count"] = due.config.hidden_size // due.config.num_attention_heads
    if window := getattr(due.config, "sliding_window", None):
        keys["attention.sliding_window"] = window
    ids = {f"tokenizer.ggml.{one}_token_id": at for at, one in enumerate(("padding", "bos", "eos"))}
    file = write(tmp_path / "made.gguf", due, keys, {}, ids)
    own: Any = api.load(str(file), dtype=torch.float32).model
    held: Any = api.load(str(file), "gguf", dtype=torch.float32).model
    assert type(held).__name__ == type(own).__name__
    torch.testing.assert_close(held(IDS).logits, own(IDS).logits, rtol=0, atol=1e-4)
