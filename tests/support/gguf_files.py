"""Small models written as GGUF files, as llama.cpp's converter does: float32, with the metadata that a test gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from accelpatch import api
from tests.support.tiny import CAUSAL

IDS = torch.arange(3, 120)[None]
WAYS = ("gguf", None)  # as stored, unpacked by transformers
HALF = 8  # divisors of a head of 16
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32} | THETA
LONG = [1.0 + at / 3 for at in range(HALF)]
SHORT = [1.0 + at / 50 for at in range(HALF)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG} | THETA
BOTH = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
PERMUTED = ("llama",)  # architectures with rows of q and k in rotary pairs
ONE_MORE = ("gemma2", "gemma3")  # architectures whose norms are written as 1 + weight
GGUF_NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}  # transformers' model_type -> the architecture


def sizes(config: Any) -> dict[str, Any]:
    """Keys that every file has."""
    epsilons = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps")
    epsilon = next(getattr(config, name) for name in epsilons if hasattr(config, name))
    kind = "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        f"attention.{kind}": epsilon, "vocab_size": config.vocab_size,
    }  # fmt: skip


def write(
    path: Path, model: Any, keys: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {},
    others: Mapping[str, Any] = {},
) -> Path:  # fmt: skip
    """Write a model. keys: under the architecture's prefix; None leaves one out. tensors: more of them. others: keys
    with their whole names."""
    config = model.config
    architecture = GGUF_NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    given = {f"{architecture}.{name}": value for name, value in {**sizes(config), **keys}.items()}
    for name, value in {**given, **others}.items():
        _add(writer, name, value)
    for name, value in _named(model, architecture).items():
        writer.add_tensor(name, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        kinds.get(type(value), writer.add_array)(name, value)


def _named(model: nn.Module, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    config: Any = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        path, _, suffix = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float().numpy()
        if architecture in ONE_MORE and path.endswith("norm"):
            value = value + 1
        if architecture in PERMUTED and path.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if path.endswith("q_proj") else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        found[f"{names.get_name(path)}.{suffix}"] = np.ascontiguousarray(value)
    return found


def made(name: str, **changes: Any) -> Any:
    """A tiny model."""
    return CAUSAL[name].make(**changes)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of a text that is longer than the lengths that scalings here are made for."""
    return model(IDS).logits


def check(
    tmp_path: Path, due: Any, way: str | None, keys: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Any:
    """The file with these keys computes what `due` does."""
    ids = {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    file = write(tmp_path / "made.gguf", due, keys, tensors or {}, ids)
    model: Any = api.load(str(file), way, dtype=torch.float32).model
    torch.testing.assert_close(logits(model), logits(due), rtol=0, atol=2e-5)
    return model


def scaling(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    """Keys of rope.scaling."""
    return {"rope.scaling.type": kind, "rope.scaling.factor": factor} | {
        f"rope.scaling.{name}": value for name, value in more.items()
    }
