"""Maps that cannot be patched are refused before anything changes, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload, dispatch_model

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.parallel import device_map
from accelpatch.parallel.device_map import DeviceMap, Place, placement_of
from accelpatch.patching.placement import WHOLE
from tests.support.offloaded import PARTS, offloaded
from tests.support.tiny import CAUSAL

GPUS = torch.device("cuda", 0), torch.device("cuda", 1)


def spread_by(model: Any, folder: Path, **places: str) -> Any:
    whole = {part: "cpu" for part in PARTS if not any(one.startswith(f"{part}.") for one in places)}
    return dispatch_model(model, whole | places, main_device="cpu", offload_dir=folder, force_hooks=True)


def refused(model: Any, message: str) -> None:
    modules = [(path, id(module), type(module)) for path, module in model.named_modules()]
    with pytest.raises(PatchError, match=message):
        accelpatch.patch(model, "int8")
    assert [(path, id(module), type(module)) for path, module in model.named_modules()] == modules


def test_a_part_on_meta_with_no_hook() -> None:
    model = CAUSAL["qwen2"].make()
    model.model.layers[1].mlp.to("meta")
    refused(model, r"model\.layers\.1\.mlp\.gate_proj\.weight is on the meta device and no hook .* load it with its")


def test_a_part_on_meta_with_no_hook_beside_others_with_some(tmp_path: Path) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "a-layer", tmp_path)
    model.model.layers[0].mlp.up_proj.to("meta")
    refused(model, r"model\.layers\.0\.mlp\.up_proj\.weight is on the meta device and no hook")


def test_a_hook_without_the_weights(tmp_path: Path) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "a-layer", tmp_path)
    del vars(model.model.layers[1].mlp.up_proj)["_hf_hook"].weights_map.dataset.index[
        "model.layers.1.mlp.up_proj.weight"
    ]
    refused(model, r"model\.layers\.1\.mlp\.up_proj: accelerate's hook has no weights named .*load the model again")


def test_a_map_that_splits_a_layer(tmp_path: Path) -> None:
    parts = ("self_attn", "input_layernorm", "post_attention_layernorm")
    places = {f"model.layers.0.{part}": "cpu" for part in parts} | {"model.layers.0.mlp": "disk"}
    model = spread_by(CAUSAL["qwen2"].make(), tmp_path, **places)
    refused(model, r"the map splits model\.layers\.0: .*no_split_module_classes=\['Qwen2DecoderLayer'\]")


def test_a_tied_weight_in_two_places(tmp_path: Path) -> None:
    model = spread_by(CAUSAL["llama"].make(), tmp_path, lm_head="disk")
    refused(
        model, r"lm_head\.weight and model\.embed_tokens\.weight are one tied weight, .* give both modules one place"
    )


def test_a_gpu_with_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread_by(CAUSAL["qwen2"].make(), tmp_path)
    monkeypatch.setattr(device_map, "free_bytes", lambda device: 1000)
    refused(model, r"cpu has 1\.0 kB free, and the replacements of its part take .* give it fewer layers in the map")


def test_devices_of_different_kinds(tmp_path: Path) -> None:
    model = spread_by(CAUSAL["qwen2"].make(), tmp_path)
    placement = placement_of(model)
    assert isinstance(placement, DeviceMap)
    placement.places["lm_head"] = Place(GPUS[1])
    with pytest.raises(PatchError, match=r"on devices of different kinds \(cpu, cuda:1\)"):
        placement.check(model)


def test_a_whole_layer_that_is_offloaded(tmp_path: Path) -> None:
    model = disk_offload(CAUSAL["opt"].make(), str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(PatchError, match=r"layers\.0 would be replaced with all that is in it.*offloaded"):
        accelpatch.patch(model, "smoothquant-opt")


def test_a_model_in_memory_has_the_plain_placement() -> None:
    assert placement_of(CAUSAL["qwen2"].make()) is WHOLE


def test_what_lies_where_on_two_gpus(tmp_path: Path) -> None:
    model = spread_by(CAUSAL["qwen2"].make(num_hidden_layers=2), tmp_path)
    placement = placement_of(model)
    assert isinstance(placement, DeviceMap)
    assert placement.lines() == []
    second = ("model.layers.1", "model.norm", "lm_head")
    placement.places = {
        path: Place(GPUS[path.startswith(second)], "cpu" if path == "lm_head" else "") for path in placement.places
    }
    assert placement.lines() == [
        "on cuda:0: model.embed_tokens, model.layers.0, model.rotary_emb",
        "on cuda:1: model.layers.1, model.norm",
        "on cpu (offloaded, runs on cuda:1): lm_head",
    ]


def test_families_that_cannot_be_split_say_why() -> None:
    from accelpatch.parallel.shards import known_family
    from tests.support.tiny import EXPERTS

    for name, why in (("gpt_oss", "its heads have sinks, and its experts have biases"), ("olmoe", "over all heads")):
        with pytest.raises(PatchError, match=f"cannot be split among ranks: .*{why}"):
            known_family(EXPERTS[name].make())
