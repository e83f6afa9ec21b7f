"""What of checkpoints that others quantised is refused by its configuration, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from accelpatch.models import checkpoint, unread
from accelpatch.models.foreign_layouts import METHODS
from tests.support.foreign import READ, ROOT

INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / name / "config.json").read_text())["quantization_config"]
    return found


def grouped(name: str, part: str, **changes: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with changes in a part of its first group; None takes the part out."""
    found = config_of(name)
    group = next(iter(found["config_groups"].values()))
    group[part] = (group[part] or {}) | changes if changes else None
    return found


@pytest.mark.parametrize("name", READ)
def test_what_is_read_has_no_reason(name: str) -> None:
    assert unread.reason(config_of(name)) is None


GPTQ, AWQ = config_of("gptq-4bit-g32"), config_of("awq-gemm-4bit-g32")
PACKED, INT, FLOAT = "ct-pack-w4a16-g32", "ct-int-w8a8", "ct-float-fp8"
NOT_READ: dict[str, tuple[dict[str, Any], str, str]] = {
    # configuration, what it is, what reads it
    "transforms": (
        config_of(PACKED) | {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}},
        "rotated weights, whose inputs or outputs are rotated while the model runs (transform_config)", "vLLM",
    ),
    "kv-cache": (config_of(FLOAT) | {"kv_cache_scheme": INPUTS}, "a quantised KV cache (kv_cache_scheme)", "vLLM"),
    "sparse": (
        config_of(FLOAT) | {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
        "sparse weights (sparsity_config: sparse-24-bitmask)", "vLLM",
    ),
    "nvfp4-groups": (grouped("ct-nvfp4", "weights", group_size=32), "groups of 32 in the format nvfp4", "vLLM"),
    "mxfp4-inputs": (grouped("ct-mxfp4", "input_activations", **INPUTS), "quantised activations beside", "vLLM"),
    "mxfp4-integers": (grouped("ct-mxfp4", "weights", type="int"), "weights of the type int in", "vLLM"),
    "mixed": (config_of(PACKED) | {"format": "mixed-precision"}, "layers in several formats", "vLLM"),
    "no-format": ({"quant_method": "compressed-tensors"}, "weights in another format (format: 'None')", "vLLM"),
    "no-groups": (config_of(PACKED) | {"config_groups": {}}, "no config_groups", "vLLM"),
    "two-schemes": (
        config_of(PACKED) | {"config_groups": {"a": config_of(PACKED)["config_groups"]["group_0"]} | {
            "b": grouped(PACKED, "weights", num_bits=8)["config_groups"]["group_0"]}},
        "layers of 2 schemes (config_groups)", "vLLM",
    ),
    "outputs": (grouped(INT, "output_activations", num_bits=8), "quantised outputs of layers", "vLLM"),
    "blocks": (grouped(FLOAT, "weights", strategy="block"), "weights by block (strategy)", "vLLM"),
    "by-tensor": (grouped(PACKED, "weights", strategy="tensor"), "weights by tensor (strategy)", "vLLM"),
    "groups-of-int8": (grouped(INT, "weights", strategy="group", group_size=32), "weights by group", "vLLM"),
    "3-bits": (grouped(PACKED, "weights", num_bits=3), "weights of 3 bits in the format pack-quantized", "vLLM"),
    "float-4": (grouped(PACKED, "weights", type="float"), "weights of the type float", "vLLM"),
    "asymmetric": (grouped(INT, "weights", symmetric=False), "asymmetric weights of 8 bits", "vLLM"),
    "w4a8": (grouped(PACKED, "input_activations", **INPUTS), "quantised activations beside weights", "vLLM"),
    "w8a16": (grouped(INT, "input_activations"), "float activations beside weights", "vLLM"),
    "some-inputs": (
        config_of(FLOAT) | {"config_groups": config_of(FLOAT)["config_groups"] | {
            "b": grouped(FLOAT, "input_activations")["config_groups"]["group_0"]}},
        "activations of 8 bits in some layers and floats in others", "vLLM",
    ),
    "w8a4": (grouped(INT, "input_activations", num_bits=4), "activations of 4 bits as int", "vLLM"),
    "mixed-types": (grouped(INT, "input_activations", type="float"), "activations of 8 bits as float", "vLLM"),
    "grouped-inputs": (grouped(FLOAT, "input_activations", strategy="group"), "activations by group", "vLLM"),
    "asymmetric-inputs": (grouped(INT, "input_activations", symmetric=False), "asymmetric activations", "vLLM"),
    "gptq-dynamic": (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, "other bits for single layers", "GPTQModel"),
    "gptq-some-left-out": (
        GPTQ | {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}}, "other bits for single layers", "GPTQModel",
    ),
    "gptq-rotation": (GPTQ | {"rotation": "hadamard"}, "rotated inputs (rotation: hadamard)", "GPTQModel"),
    "gptq-adapter": (GPTQ | {"adapter": {"name": "lora", "rank": 64}}, "an adapter of its own", "GPTQModel"),
    "gptq-words": (GPTQ | {"pack_dtype": "int16"}, "words of another size (pack_dtype: int16)", "GPTQModel"),
    "gptq-marlin": (GPTQ | {"is_marlin_format": True}, "weights in Marlin's packing", "vLLM"),
    "gptq-mixed-bits": (
        GPTQ | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}}, "auto-round's other bits", "auto-round",
    ),
    "gptq-mixed-groups": (GPTQ | {"extra_config": {"a": {"bits": 4, "group_size": 64}}}, "auto-round's", "auto-round"),
    "awq-mixed-bits": (AWQ | {"extra_config": {"a": {"bits": 8}}}, "auto-round's other bits", "auto-round"),
    "awq-dynamic": (AWQ | {"dynamic": {"-:.*up.*": {}}}, "layers left out (dynamic)", "GPTQModel"),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, "auto-round is not read", "the package auto-round"),
    "auto-round-mixed": (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}},
        "with other bits for single layers (extra_config)", "the package auto-round",
    ),
    "hqq": ({"quant_method": "hqq"}, "hqq is not read", "the package hqq"),
    "fp8-whole": ({"quant_method": "fp8"}, "fp8 with weight_block_size None is not", "transformers itself"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "with quant_algo 'FP8' is not", "TensorRT-LLM"),
}  # fmt: skip


@pytest.mark.parametrize("config, what, library", NOT_READ.values(), ids=NOT_READ.keys())
def test_a_reason_says_what_it_is_and_what_reads_it(config: dict[str, Any], what: str, library: str) -> None:
    said = unread.reason(config)
    assert said is not None
    before, _, after = said.partition(" is not read here; ")
    assert what in f"{before} is not read"
    assert library in after
    assert after.endswith("reads it, or give the float checkpoint that it was made from")


NEUTRAL: dict[str, dict[str, Any]] = {
    "dense-sparsity": config_of(FLOAT) | {"sparsity_config": {"format": "dense"}},
    "no-transforms": config_of(PACKED) | {"transform_config": {"config_groups": {}}},
    "no-sparsity": config_of(FLOAT) | {"sparsity_config": None, "transform_config": None},
    "float-layers-by-auto-round": GPTQ | {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}},
    "the-same-bits": GPTQ | {"extra_config": {"a": {"bits": 4, "group_size": 32, "sym": True}}},
    "layers-left-out": GPTQ | {"dynamic": {r"-:^model\.layers\.0\.mlp\.up_proj$": {}}},
    "no-rules": GPTQ | {"dynamic": {}, "rotation": None, "adapter": None, "is_marlin_format": False},
    "no-pack-dtype": {key: value for key, value in GPTQ.items() if key != "pack_dtype"},
    "no-zero-points": AWQ | {"zero_point": False},
    "strategy-by-the-group": grouped(PACKED, "weights", strategy=None),
}


@pytest.mark.parametrize("config", NEUTRAL.values(), ids=NEUTRAL.keys())
def test_what_changes_nothing_is_no_reason(config: dict[str, Any]) -> None:
    assert unread.reason(config) is None


DAMAGED: dict[str, dict[str, Any]] = {
    "groups-a-list": config_of(PACKED) | {"config_groups": [1, 2]},
    "group-a-word": config_of(PACKED) | {"config_groups": {"a": "x"}},
    "weights-a-list": config_of(PACKED) | {"config_groups": {"a": {"weights": [4]}}},
    "extra-a-list": GPTQ | {"extra_config": ["a"]},
    "extra-a-word": GPTQ | {"extra_config": {"a": "x"}},
}


@pytest.mark.parametrize("config", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_a_reason_and_no_other_error(config: dict[str, Any]) -> None:
    assert "is not read here" in str(unread.reason(config))


def test_every_quantizer_of_transformers_is_read_or_in_the_table() -> None:
    known = {*unread.LIBRARIES, *METHODS, "bitsandbytes_4bit", "bitsandbytes_8bit", "gguf", "gemma"}
    assert {name for name in AUTO_QUANTIZER_MAPPING if name != checkpoint.OWN} <= known


@pytest.mark.parametrize("key", checkpoint.QUANTIZATION)
@pytest.mark.parametrize("inside", [True, False], ids=["text_config", "config"])
def test_quantisation_is_seen_in_each_place(key: str, inside: bool, tmp_path: Path) -> None:
    said = {key: {"quant_method": "hqq"}}
    config = {"model_type": "llama"} | ({"text_config": said} if inside else said)
    assert checkpoint.quantization_method(config) == "hqq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"quantised already \(hqq\): hqq is not read here; .* package hqq reads it"):
        checkpoint.read_config(tmp_path)
