"""Checkpoints of others that are refused before anything is loaded, though their tensors could be taken for others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelpatch import api
from accelpatch.errors import LoadError
from tests.support.foreign import K_PROJ, ROOT
from tests.support.tiny import EXPERTS


def with_config(name: str, folder: Path, **changes: Any) -> Path:
    """A fixture with changes of its quantization_config."""
    shutil.copytree(ROOT / name, folder)
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


ROTATED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
SILENT: dict[str, tuple[str, dict[str, Any], str]] = {
    # these have the tensors of what is read, and would compute something else
    "transforms": ("ct-pack-w4a16-g32", {"transform_config": ROTATED}, r"\(transform_config\).*vLLM, reads it"),
    "rotation": ("gptq-4bit-g32", {"rotation": "hadamard"}, r"\(rotation: hadamard\).*GPTQModel reads it"),
    "adapter": ("gptq-4bit-g32", {"adapter": {"name": "lora"}}, r"\(adapter\).*GPTQModel reads it"),
    "kv-cache": ("ct-float-fp8", {"kv_cache_scheme": {"num_bits": 8}}, r"\(kv_cache_scheme\).*vLLM, reads it"),
    "mixed-bits": ("gptq-4bit-g32", {"extra_config": {K_PROJ: {"bits": 8}}}, r"\(extra_config\).*auto-round reads it"),
    "auto-round": ("gptq-4bit-g32", {"quant_method": "auto-round"}, r"\(auto-round\).*auto-round reads it"),
}


@pytest.mark.parametrize("name, changes, message", SILENT.values(), ids=SILENT.keys())
def test_what_tensors_do_not_show_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = with_config(name, tmp_path / "it", **changes)
    with pytest.raises(LoadError, match=message) as caught:
        api.load(str(folder))
    assert str(folder) in str(caught.value)
    with pytest.raises(LoadError, match=message):
        api.load(str(folder), "int8")


def test_activations_of_4_bit_weights_are_not_forgotten(tmp_path: Path) -> None:
    folder = with_config("ct-pack-w4a16-g32", tmp_path / "it")
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(LoadError, match=r"quantised activations beside weights in the format pack-quantized"):
        api.load(str(folder))


PER_EXPERT = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w1", "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj",
    "a-stack": "model.layers.0.mlp.experts.gate_up_proj", "nested": "model.layers.0.mlp.experts.experts.1.down_proj",
}  # fmt: skip
GROUPS = {"bits": 4, "group_size": 32}
FORMATS = {
    "gptq": ({"quant_method": "gptq"} | GROUPS, ("qweight", "qzeros", "scales", "g_idx"), "GPTQModel"),
    "awq": ({"quant_method": "awq"} | GROUPS, ("qweight", "qzeros", "scales"), "GPTQModel"),
    "packed": (
        json.loads((ROOT / "ct-pack-w4a16-g32/config.json").read_text())["quantization_config"],
        ("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors",
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        ("weight.quant_state.bitsandbytes__nf4", "weight"), "bitsandbytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("place", PER_EXPERT.values(), ids=PER_EXPERT.keys())
def test_quantised_experts_are_refused_by_what_they_are(place: str, form: str, tmp_path: Path) -> None:
    config, parts, library = FORMATS[form]
    model: Any = EXPERTS["mixtral"].make()
    model.save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    held = load_file(tmp_path / "model.safetensors")
    more = {f"{place}.{part}": torch.zeros(4, 4, dtype=torch.int32) for part in parts}
    save_file({name: one for name, one in held.items() if "experts" not in name} | more, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=rf"quantised experts \({place}\).*{library}.* reads it, or give the float"):
        api.load(str(tmp_path))


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_description_apart_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(ROOT / "gptq-4bit-g32", folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "quantize_config.json").unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(facts.pop("quantization_config")))
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(LoadError, match=rf"disagree.*: {name} says that they are quantised, and config\.json does not"):
        api.load(str(folder))


def test_the_first_name_of_the_configuration_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(ROOT / "ct-pack-w4a16-g32", folder)
    facts = json.loads((folder / "config.json").read_text())
    facts["compression_config"] = facts.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(facts))
    model: Any = api.load(str(folder), dtype=torch.float32).model
    due = api.load(str(ROOT / "ct-pack-w4a16-g32"), dtype=torch.float32).model
    assert torch.equal(torch.as_tensor(model.get_submodule(K_PROJ).weight), due.get_submodule(K_PROJ).weight)
