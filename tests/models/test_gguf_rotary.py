"""Rotary embedding of GGUF files: logits beside those of the same rope_parameters, in both ways of loading."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch import api
from accelpatch.errors import LoadError
from tests.support.gguf_files import BOTH, HALF, LONG, LONGROPE, THETA, WAYS, YARN, check, logits, made, scaling, write

ways = pytest.mark.parametrize("way", WAYS, ids=("stored", "unpacked"))
STORED = ("llama", "qwen2", "qwen3")
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip


def llama3(factor: float = 32.0, theta: float = 500000.0) -> list[float]:
    """Divisors as llama.cpp's converter writes them."""
    found = []
    for at in range(HALF):
        length = 2 * math.pi * theta ** (at / HALF)
        smooth = (8192 / length - 1) / 3
        found.append(1.0 if length < 2048 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return found


SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # rope_parameters -> keys, tensors
    "linear": ({"rope_type": "linear", "factor": 3.0} | THETA, scaling("linear", 3.0, finetuned=True), {}),
    "a-factor-alone": ({"rope_type": "linear", "factor": 2.5} | THETA, {"rope.scaling.factor": 2.5}, {}),
    "an-old-key": ({"rope_type": "linear", "factor": 2.5} | THETA, {"rope.scale_linear": 2.5}, {}),
    "yarn": (YARN, scaling("yarn", 4.0, original_context_length=32), {}),
    "yarn-betas": (
        YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
        scaling("yarn", 4.0, original_context_length=32, yarn_beta_fast=4.0, yarn_beta_slow=0.5, yarn_ext_factor=1.0,
                attn_factor=1.0, yarn_log_multiplier=0.0, yarn_attn_factor=0.1 * math.log(4.0) + 1),
        {},
    ),
    "yarn-no-length": (YARN | {"original_max_position_embeddings": 128}, scaling("yarn", 4.0), {}),
    "longrope": (
        LONGROPE | {"original_max_position_embeddings": 64},
        {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64},
        BOTH,
    ),
    "longrope-short": (
        LONGROPE | {"original_max_position_embeddings": 256, "attention_factor": 1.19},
        {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.19},
        BOTH,
    ),
    "llama3": (LLAMA3, {"rope.freq_base": 500000.0}, {"rope_freqs.weight": llama3()}),
    "base": ({"rope_type": "default", "rope_theta": 77.0}, {"rope.freq_base": 77.0}, {}),
}  # fmt: skip


@pytest.mark.each_value
@ways
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("rope, keys, tensors", SCALED.values(), ids=SCALED.keys())
def test_rotary_embedding_is_read(
    rope: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Any], name: str, way: str | None, tmp_path: Path
) -> None:
    due = made(name, rope_parameters=rope)
    assert not torch.allclose(logits(due), logits(made(name)), atol=1e-2)
    check(tmp_path, due, way, {"attention.key_length": 16, **keys}, tensors)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "yarn-ext": (scaling("yarn", 4.0, yarn_ext_factor=0.5), {}, "yarn_ext_factor is 0.5"),
    "yarn-ext-0": (scaling("yarn", 4.0, yarn_ext_factor=0.0), {}, "yarn_ext_factor is 0.0"),
    "yarn-attention": (scaling("yarn", 4.0, yarn_attn_factor=1.0), {}, "yarn_attn_factor is 1.0"),
    "linear-attention": (scaling("linear", 4.0, attn_factor=1.1), {}, "attn_factor is 1.1"),
    "longrope-alone": ({"rope.scaling.type": "longrope"}, {}, "rope.scaling.type is 'longrope'"),
    "one-of-two": ({}, {"rope_factors_long.weight": LONG}, "has no rope_factors_short.weight"),
    "longrope-and-yarn": (scaling("yarn", 4.0), BOTH, "rope.scaling.type is 'yarn'"),
    "freqs": ({}, {"rope_freqs.weight": LONG}, "rope_freqs.weight scales the rotary frequencies"),
    "freqs-and-linear": (scaling("linear", 2.0), {"rope_freqs.weight": llama3()}, "rope.scaling.factor is 2.0"),
    "freqs-nan": ({}, {"rope_freqs.weight": [float("nan")] * HALF}, "values that are not positive"),
    "freqs-2d": ({}, {"rope_freqs.weight": [LONG, LONG]}, "no list of float32 values"),
    "too-few": ({"rope.scaling.original_context_length": 64}, {name: [1.0, 2.0] for name in BOTH}, "made.gguf"),
}


@ways
@pytest.mark.parametrize("keys, tensors, message", OTHERS.values(), ids=OTHERS.keys())
def test_rotary_embedding_that_is_not_read_is_refused(
    keys: dict[str, Any], tensors: dict[str, Any], message: str, way: str | None, tmp_path: Path
) -> None:
    file = write(tmp_path / "made.gguf", made("llama"), keys, tensors)
    with pytest.raises(LoadError) as caught:
        api.load(str(file), way)
    assert message in str(caught.value)


def test_divisors_of_one_change_nothing(tmp_path: Path) -> None:
    check(tmp_path, made("llama"), "gguf", {}, {"rope_freqs.weight": [1.0] * HALF})


@ways
@pytest.mark.parametrize("rope, keys, tensors", SCALED.values(), ids=SCALED.keys())
def test_the_configuration_beside_a_file_decides(
    rope: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Any], way: str | None, tmp_path: Path
) -> None:
    due = made("llama", rope_parameters=rope)
    write(tmp_path / "made.gguf", due, {**keys, "attention.of_tomorrow": 2.0}, tensors)
    due.config.dtype = torch.bfloat16  # of the float checkpoint; a file is never rounded to it
    due.config.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(api.load(str(tmp_path), way).model), logits(due), rtol=0, atol=2e-5)
    made("llama").config.save_pretrained(tmp_path)
    if rope["rope_type"] == "default":
        return
    with pytest.raises(LoadError, match=r"scales the rotary frequencies, and config\.json beside it does not"):
        api.load(str(tmp_path), way)


def test_scaled_rotary_frequencies_need_a_configuration(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", made("llama"), tensors={"rope_freqs.weight": [1.0 + at for at in range(8)]})
    with pytest.raises(LoadError, match=r"rope_freqs\.weight scales the rotary frequencies"):
        api.load(str(tmp_path), "gguf")
    config, file = made("llama").config.to_dict(), tmp_path / "config.json"
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert api.load(str(tmp_path), "gguf").model.config.rope_parameters["factor"] == 2.0
    file.write_text(json.dumps(config | {"rope_scaling": None}))
    with pytest.raises(LoadError, match=r"rope_freqs\.weight scales the rotary frequencies"):
        api.load(str(tmp_path), "gguf")
