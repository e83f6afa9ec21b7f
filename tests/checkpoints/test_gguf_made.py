"""GGUF files of other architectures and types, beside transformers' own unpacking; and the embedded model's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from accelpatch import api
from accelpatch.checkpoints.gguf_tensors import open_gguf
from accelpatch.models import embedded, load
from accelpatch.recipe import recipe as recipes
from tests.support.packed import plain

IDS = torch.arange(1, 13)[None]
SHAPES = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
SHAPES |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}


def written(path: Path, architecture: str, kind: str, *, tied: bool, biases: bool = False) -> Path:
    """One random layer, all of its matrices in one type."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(128)
    random, form = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    matrices = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()} | {"token_embd.weight": (128, 64)}
    for name, shape in (matrices | ({} if tied else {"output.weight": (128, 64)})).items():
        blocks = gguf.quantize(random.normal(size=shape).astype(np.float32) / 8, form)
        writer.add_tensor(name, blocks, raw_dtype=form)
    for name in ("attn_q", "attn_k", "attn_v") if biases else ():
        writer.add_tensor(f"blk.0.{name}.bias", random.normal(size=SHAPES[name][0]).astype(np.float32))
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = [
    pytest.param("llama", "Q4_0", True, False, id="llama-Q4_0-tied"),  # no 4-bit embedding: its blocks stay
    pytest.param("llama", "Q4_1", False, False, id="llama-Q4_1"),
    pytest.param("llama", "F16", True, False, id="llama-F16"),
    pytest.param("qwen2", "Q8_0", True, True, id="qwen2-Q8_0-biases"),
]


@pytest.mark.parametrize("architecture, kind, tied, biases", KINDS)
@torch.no_grad()
def test_it_computes_what_transformers_unpacks(
    tmp_path: Path, architecture: str, kind: str, tied: bool, biases: bool
) -> None:
    file = written(tmp_path / "made.gguf", architecture, kind, tied=tied, biases=biases)
    own: Any = api.load(str(file), dtype=torch.float32).model
    held: Any = api.load(str(file), "gguf", dtype=torch.float32).model
    torch.testing.assert_close(held(IDS).logits, own(IDS).logits, rtol=0, atol=1e-4)
    made = {site.path: site.replacer for site in held.accelpatch.report().sites}
    assert {path: made[path] for path in open_gguf(file).sites} == {p: r for p, (r, _) in open_gguf(file).sites.items()}
    held.save_pretrained(tmp_path / "saved")
    again: Any = api.load(str(tmp_path / "saved"), dtype=torch.float32).model
    assert torch.equal(again(IDS).logits, held(IDS).logits)


def test_the_embedded_models_file_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "made.gguf", "llama", "Q4_1", tied=False)
    (tmp_path / "one").mkdir()
    file = file.rename(tmp_path / "one/made.gguf")
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(embedded.VARIABLE, str(file.parent))
    assert load.gguf_file("smollm2-135m") == file
    loaded = api.load("smollm2-135m", "gguf")
    assert loaded.source.kind == "embedded"
    assert loaded.model.accelpatch.report().recipe == "gguf"


def test_half_scales_are_kept_when_an_int8_weight_is_written() -> None:
    text = "extends: int8\nrules:\n- name: linear\n  match: {role: linear}\n  replace: int8_weight_only\n"
    model: Any = plain("llama", num_hidden_layers=1)
    api.patch(model, recipes.parse(text + "  options: {group_size: 32, half_scales: true}\n"), verify=False)
    module = model.model.layers[0].mlp.up_proj
    assert module.canonical().scale.dtype == torch.float16
    module.weight.data.copy_(module.weight * 0.5)
    assert module.canonical().scale.dtype == torch.float16
