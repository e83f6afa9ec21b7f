"""Metadata of GGUF files that changes the computation: logits beside transformers' with the same configuration, in both
ways of loading, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from accelpatch import api
from accelpatch.errors import LoadError
from accelpatch.models import gguf_keys, load
from tests.support.gguf_files import BOTH, LONGROPE, WAYS, YARN, check, logits, made, scaling, write

ways = pytest.mark.parametrize("way", WAYS, ids=("stored", "unpacked"))
NOTHING: dict[str, dict[str, Any]] = {
    "scaling-none": scaling("none", 4.0, original_context_length=32),
    "factor-1": scaling("linear", 1.0, attn_factor=1.0, yarn_log_multiplier=0.0),
    "yarn-factor-1": scaling("yarn", 1.0, yarn_attn_factor=1.0),
    "factor-0": scaling("linear", 0.0),
    "softcaps-0": {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "router_logit_softcapping": 0.0},
    "scales": {"logit_scale": 1.0, "residual_scale": 0.0, "embedding_scale": 1.0, "attention.scale": 0.25},
    "flags": {"use_parallel_residual": False, "swin_norm": False, "attention.causal": True},
    "attention": {"attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.sliding_window": 0},
    "a-window-that-no-text-fills": {"attention.sliding_window": 128},
    "experts-0": {"expert_count": 0, "expert_used_count": 0, "expert_weights_norm": False, "expert_gating_func": 0},
    "heads": {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
    "sections-0": {"rope.dimension_sections": [0, 0, 0, 0]},
    "layouts": {"tensor_data_layout": "Meta AI original pth", "pooling_type": 3},
    "unknown-nothing": {"attention.of_tomorrow": 0.0, "a_flag": False, "a_word": "", "comment": "made for a test"},
    "base": {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0},
}


@ways
@pytest.mark.parametrize("keys", NOTHING.values(), ids=NOTHING.keys())
def test_what_changes_nothing_is_no_reason_to_refuse(keys: dict[str, Any], way: str | None, tmp_path: Path) -> None:
    check(tmp_path, made("llama"), way, keys)


def test_keys_elsewhere_are_no_reason_to_refuse(tmp_path: Path) -> None:
    others = {"general.type": "model", "general.some": 3.5, "quantize.imatrix.file": "x", "mytool.attention.scale": 7.0,
              "split.count": 1, "tokenizer.ggml.of_tomorrow": 5}  # fmt: skip
    file = write(tmp_path / "made.gguf", made("llama"), others=others)
    assert api.load(str(file), "gguf").model is not None


REFUSED: dict[str, Any] = {
    "attention.clamp_kqv": 8.0, "attention.max_alibi_bias": 8.0, "logit_scale": 0.0625, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "router_logit_softcapping": 30.0, "attention.sliding_window": 5,
    "attention.sliding_window_pattern": 2, "attention.scale": 0.1, "attention.output_scale": 0.5,
    "attention.causal": False, "residual_scale": 0.22, "embedding_scale": 12.0, "use_parallel_residual": True,
    "tensor_data_layout": "jploski", "rope.dimension_sections": [2, 3, 3, 0], "rope.freq_base_swa": 77.0,
    "rope.dimension_count": 8, "pooling_type": 4, "swin_norm": True, "expert_count": 4, "expert_weights_scale": 2.5,
    "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 8, "leading_dense_block_count": 1,
    "nextn_predict_layers": 1, "attention.temperature_scale": 0.1, "attention.kv_lora_rank": 8,
    "rope.scaling.alpha": 9.0,
    "rope.scaling.attn_factor": 1.2, "rope.scaling.yarn_attn_factor": 1.2, "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.scaling.type": "llama3", "rope.scaling.factor": float("nan"), "rope.freq_base": -1.0,
    "attention.of_tomorrow": 2.0, "rope.freq_base_per_layer": [1.0, 2.0], "hidden_activation": "gelu",
    "classifier.output_labels": ["no", "yes"],
}  # fmt: skip


@ways
@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_computation_is_refused_by_its_name(name: str, way: str | None, tmp_path: Path) -> None:
    file = write(tmp_path / "made.gguf", made("llama"), {name: REFUSED[name]})
    with pytest.raises(LoadError, match=rf"made\.gguf: llama\.{name} is .* is not read: put the model's own config"):
        api.load(str(file), way)
    if way == "gguf":
        with pytest.raises(LoadError, match=name):
            api.plan_from_config(str(file), "gguf")


GEMMA3 = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
          "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}  # fmt: skip
LEFT_OUT: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3-linear": (
        "gemma3",
        {"rope_parameters": GEMMA3, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None,
         "final_logit_softcapping": 3.0},
        {"attention.key_length": 16, "rope.freq_base": 1e6, "rope.freq_base_swa": 300.0, **scaling("linear", 8.0),
         "attention.sliding_window": 5, "attention.sliding_window_pattern": 6, "final_logit_softcapping": 3.0},
        {},
    ),
    "gemma2-softcaps": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
        {"attention.key_length": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
         "attention.sliding_window": 5},
        {},
    ),
    "gemma2-no-softcaps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 16},
        {"attention.key_length": 16, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
         "attention.sliding_window": 5},
        {},
    ),
    "starcoder2-base": (
        "starcoder2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "sliding_window": None},
        {"rope.freq_base": 77.0},
        {},
    ),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE | {"attention_factor": 1.19, "original_max_position_embeddings": 64},
         "original_max_position_embeddings": 64},
        {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 64, "rope.dimension_count": 16},
        BOTH,
    ),
    "phi3-window": ("phi3", {"sliding_window": 7}, {"attention.sliding_window": 7, "rope.dimension_count": 16}, {}),
    "phi3-half": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
        {},
    ),
    "stablelm-half": (
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8, "rope.freq_base": 77.0, "use_parallel_residual": True},
        {},
    ),
    "qwen2-heads": ("qwen2", {"head_dim": 8}, {"attention.key_length": 8}, {}),
    "qwen3-heads": ("qwen3", {"head_dim": 16}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name, changes, keys, tensors", LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_what_transformers_leaves_out_is_put_right(
    name: str, changes: dict[str, Any], keys: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    model = check(tmp_path, made(name, **changes), None, keys, tensors)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load.load(str(tmp_path / "saved")).model), logits(model))


def test_a_patched_model_keeps_what_was_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "made.gguf", made("llama", rope_parameters=YARN), scaling("yarn", 4.0, original_context_length=32)
    )
    model: Any = api.load(str(file), "int8", dtype=torch.float32).model
    assert model.config.rope_parameters == YARN
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(api.load(str(tmp_path / "saved")).model), logits(model))


def test_tensors_that_transformers_would_leave_out_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "made.gguf", made("llama", attention_bias=True))
    with pytest.raises(LoadError, match=r"LlamaForCausalLM has places for .* would leave the others out"):
        api.load(str(file))
    made("llama", attention_bias=True).config.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(api.load(str(tmp_path), dtype=torch.float32).model), logits(made("llama", attention_bias=True)),
        rtol=0, atol=2e-5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_files_that_are_no_model_are_refused(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "made.gguf", made("llama"), others={"general.type": kind})
    with pytest.raises(LoadError, match=f"no model but of the type '{kind}'"):
        api.load(str(file))


@ways
def test_a_part_of_a_model_is_refused(way: str | None, tmp_path: Path) -> None:
    file = write(tmp_path / "made.gguf", made("llama"), others={"split.count": 3, "split.no": 0})
    with pytest.raises(LoadError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        api.load(str(file), way)


def test_the_table_has_every_key_of_the_format() -> None:
    groups: list[Any] = [gguf.Keys]
    found = set()
    for group in groups:
        for name, value in vars(group).items():
            if isinstance(value, type) and not name.startswith("_"):
                groups.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}."))
    found -= {"{dense}_feat_in", "{dense}_feat_out"}
    assert found - gguf_keys.KEYS.keys() == set()
    assert len(found) > 100


def test_no_key_stands_twice() -> None:
    groups = (gguf_keys.IRRELEVANT, gguf_keys.READ, gguf_keys.REFUSED, gguf_keys.SCALES, gguf_keys.WHOLE,
              gguf_keys.WINDOWED)  # fmt: skip
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
