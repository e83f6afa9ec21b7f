"""Damaged and untrusted checkpoints: each is refused with advice, and none runs or fetches anything."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from accelpatch.errors import LoadError
from accelpatch.models import checkpoint, load

IDS = torch.arange(1, 13)[None]


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load.load(str(folder))
    return str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path)


def test_folder_of_a_gguf_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert "does not begin as a GGUF file does" in refused(tmp_path)  # one alone is the model
    (tmp_path / "other.gguf").touch()
    assert f"give the file itself: {tmp_path / 'model.gguf'}" in refused(tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("{,", "config.json:1:2: not JSON"),
        ("[]", "a JSON object is expected"),
        ("{}", "model_type"),
        ("\0", "not JSON"),
    ],
    ids=["syntax", "list", "no_model_type", "binary"],
)
def test_config_that_is_none(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    assert said in refused(folder)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 3}, "weights missing: model.layers.2."),
        ({"num_hidden_layers": 1}, "not in the model: model.layers.1."),
        ({"intermediate_size": 96}, "of another shape: model.layers.0.mlp.down_proj.weight (64, 160) for (64, 96)"),
        ({"vocab_size": 120}, "of another shape: lm_head.weight (128, 64) for (120, 64)"),
        ({"attention_bias": True}, "weights missing: model.layers.0.self_attn.k_proj.bias"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "weights missing"),
    ],
    ids=["type", "more_layers", "fewer_layers", "shape", "vocabulary", "bias", "family"],
)
def test_config_that_disagrees_with_the_weights(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    assert said in refused(folder)


def test_missing_weight_is_not_made_up(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "weights missing: model.layers.1.mlp.up_proj.weight" in refused(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(folder)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}" in refused(sharded)


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["empty", "in_length", "in_header", "one_byte_short"])
def test_truncated_shard(sharded: Path, kept: int) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    message = refused(sharded)
    assert str(shard) in message
    assert "truncated or damaged" in message


def test_bit_flips_in_a_header_never_load_other_weights(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    outcomes = set()
    for place in range(0, header, 37):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        (folder / "model.safetensors").write_bytes(flipped)
        try:
            loaded = load.load(str(folder)).model
        except LoadError:
            outcomes.add("refused")
        else:
            outcomes.add("loaded")
            assert torch.equal(loaded(IDS).logits, tiny_llama(IDS).logits), f"byte {place}"
    assert "refused" in outcomes


def test_bit_flip_in_the_data_is_found_by_checksums(sharded: Path) -> None:
    checkpoint.write_checksums(sharded)
    load.load(str(sharded))
    shard = sorted(sharded.glob("*.safetensors"))[1]
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 16
    shard.write_bytes(damaged)
    assert f"{shard} is not the file whose SHA-256" in refused(sharded)


def test_shard_that_lacks_what_the_index_says(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    assert f"{second} lacks" in refused(sharded)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "shard.bin", 5], ids=str)
def test_index_that_points_elsewhere(sharded: Path, name: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "no safetensors file beside it" in refused(sharded)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    message = refused(folder)
    assert "pickled" in message
    assert "save_pretrained" in message


def test_config_cannot_name_a_pickle(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    (folder / "evil.bin").write_bytes(pickle.dumps(Bomb()))
    edit_config(folder, transformers_weights="evil.bin")
    assert torch.equal(load.load(str(folder)).model(IDS).logits, tiny_llama(IDS).logits)


@pytest.mark.parametrize("kind", ["llama", "made_up"], ids=["native", "foreign"])
def test_code_beside_the_weights_is_not_run(folder: Path, tmp_path: Path, kind: str) -> None:
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoModel": "code.Model"}
    edit_config(folder, auto_map=names, model_type=kind, trust_remote_code=True)
    if kind == "llama":
        assert type(load.load(str(folder)).model) is LlamaForCausalLM
    else:
        assert "code that comes with a checkpoint is not run" in refused(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "key",
    ["attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"],
)
@pytest.mark.parametrize("value", ["kernels-community/flash-attn", "flash_attention_2", "no_such"])
def test_kernel_names_in_the_config_are_ignored(folder: Path, key: str, value: str) -> None:
    edit_config(folder, **{key: value})
    assert load.load(str(folder)).model.config._attn_implementation == "sdpa"
    assert load.from_config(str(folder)).config._attn_implementation == "sdpa"


def test_adapters_are_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    assert "is an adapter" in refused(folder)


def test_quantised_checkpoints_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised already (gptq)" in refused(folder)
