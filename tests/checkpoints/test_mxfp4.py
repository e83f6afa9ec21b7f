"""MXFP4 as transformers has gpt-oss's experts and compressed-tensors linear layers: read, saved as ours, refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import accelpatch
from accelpatch.checkpoints import foreign
from accelpatch.checkpoints.inspection import inspect
from accelpatch.errors import KernelError, LoadError, SaveError
from accelpatch.modules.quantized_experts import QuantizedExperts
from tests.checkpoints.test_foreign_mutations import mutated
from tests.support.foreign import K_PROJ, ROOT, expected

OSS, LAYER = "gpt-oss-mxfp4", "model.layers.0.mlp.experts"
HELD = load_file(ROOT / OSS / "model.safetensors")
SCALES, BLOCKS = HELD[f"{LAYER}.down_proj_scales"], HELD[f"{LAYER}.down_proj_blocks"]
PARTS = ("gate_up_proj", "down_proj")
LINEAR = load_file(ROOT / "ct-mxfp4/model.safetensors")
PACKED, POWERS = LINEAR[f"{K_PROJ}.weight_packed"], LINEAR[f"{K_PROJ}.weight_scale"]


def with_tensors(name: str, folder: Path, changes: dict[str, Tensor | None], **config: Any) -> Path:
    """A fixture with changes of its tensors (None: without one) and of config.json."""
    shutil.copytree(ROOT / name, folder)
    held = load_file(folder / "model.safetensors") | changes
    save_file({key: one for key, one in held.items() if one is not None}, folder / "model.safetensors")
    facts = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@torch.no_grad()
def test_experts_are_those_of_transformers() -> None:
    due = expected(OSS)
    model: Any = accelpatch.load(str(ROOT / OSS), dtype=torch.float32).model
    experts = model.get_submodule(LAYER)
    assert isinstance(experts, QuantizedExperts)
    assert torch.equal(experts.gate_up_proj[1].to(torch.bfloat16), due[f"{LAYER}.gate_up_proj.weight"])
    torch.testing.assert_close(model(due["input_ids"]).logits[0], due["logits"], rtol=0, atol=1e-5)


def test_it_is_saved_as_ours_bit_for_bit_and_as_small(tmp_path: Path) -> None:
    model: Any = accelpatch.load(str(ROOT / OSS)).model
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert torch.equal(held[f"{LAYER}.down_proj_q"].view(torch.uint8), BLOCKS.flatten(2))
    assert torch.equal(held[f"{LAYER}.down_proj_scale"].view(torch.uint8), SCALES)
    rows = held[f"{LAYER}.gate_up_proj_scale"].view(torch.uint8).chunk(2, dim=1)
    assert torch.equal(torch.stack(rows, 2).flatten(1, 2), HELD[f"{LAYER}.gate_up_proj_scales"])
    again: Any = accelpatch.load(str(tmp_path)).model
    ids = expected(OSS)["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert sum(one.nbytes for one in held.values()) == sum(one.nbytes for one in HELD.values())


def of(part: str, value: Tensor | None) -> dict[str, Tensor | None]:
    return {f"{LAYER}.{part}": value}


def nan(scales: Tensor) -> Tensor:
    found = scales.clone()
    found.view(-1)[7] = 255
    return found


BAD: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "nan": (OSS, of("down_proj_scales", nan(SCALES)), f"{LAYER}.down_proj_scales[0, 3, 1] is 255, which is NaN"),
    "no-scales": (OSS, of("gate_up_proj_scales", None), f"{LAYER}.gate_up_proj_scales is missing"),
    "no-bias": (OSS, of("down_proj_bias", None), f"{LAYER}.down_proj_bias is missing"),
    "scales-shape": (OSS, of("down_proj_scales", SCALES[:, :, :1].clone()), "_scales is torch.uint8 [2, 32, 1]"),
    "blocks-flat": (OSS, of("down_proj_blocks", BLOCKS.flatten(2)), "down_proj_blocks is torch.uint8 [2, 32, 32]"),
    "blocks-words": (OSS, of("down_proj_blocks", BLOCKS.view(torch.int32)), "down_proj_blocks is torch.int32"),
    "floats-beside": (OSS, of("down_proj", torch.zeros(2, 64, 32)), f"{LAYER}.down_proj is not in the model"),
    "linear-nan": ("ct-mxfp4", {f"{K_PROJ}.weight_scale": nan(POWERS)}, f"{K_PROJ}.weight_scale[3, 1] is 255"),
    "linear-no-scale": ("ct-mxfp4", {f"{K_PROJ}.weight_scale": None}, f"{K_PROJ}.weight_scale is missing"),
    "linear-groups-of-16": (
        "ct-mxfp4", {f"{K_PROJ}.weight_scale": POWERS.repeat(1, 2)}, f"{K_PROJ}.weight_scale is torch.uint8 [32, 4]",
    ),
    "linear-of-int4": (
        "ct-mxfp4", {f"{K_PROJ}.weight_packed": PACKED.view(torch.int32)}, f"{K_PROJ}.weight_packed is torch.int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, changes, message", BAD.values(), ids=BAD.keys())
def test_damage_is_refused_by_file_and_tensor(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = with_tensors(name, tmp_path / "it", changes)
    with pytest.raises(LoadError) as caught:
        accelpatch.load(str(folder))
    assert message in str(caught.value)
    assert str(folder / "model.safetensors") in str(caught.value)


def test_the_file_that_is_named_is_that_of_the_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(ROOT / OSS, folder)
    (folder / "model.safetensors").unlink()
    wrong = HELD | {f"{LAYER}.gate_up_proj_scales": nan(HELD[f"{LAYER}.gate_up_proj_scales"])}
    files = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in wrong}
    for file in set(files.values()):
        save_file({name: one for name, one in wrong.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors: .*gate_up_proj_scales\[0, 7, 0\] is 255"):
        accelpatch.load(str(folder))


def test_what_failed_verification_is_not_saved_as_if_it_were_verified(tmp_path: Path) -> None:
    scales = {f"{LAYER}.{part}_scales": torch.full_like(HELD[f"{LAYER}.{part}_scales"], 254) for part in PARTS}
    folder = with_tensors(OSS, tmp_path / "it", dict(scales))
    model: Any = accelpatch.load(str(folder)).model
    assert model.accelpatch.report().verification.failures
    with pytest.raises(SaveError, match=rf"^{LAYER} is quantised and failed verification.*verify=False"):
        model.save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    model = accelpatch.load(str(folder), verify=False).model
    model.save_pretrained(tmp_path / "ours")
    assert isinstance(
        accelpatch.load(str(tmp_path / "ours"), verify=False).model.get_submodule(LAYER), QuantizedExperts
    )


@pytest.mark.parametrize("given", ["x", ["x"], 5, True, []], ids=str)
def test_activations_that_are_no_mapping(given: Any, tmp_path: Path) -> None:
    facts = json.loads((ROOT / "ct-mxfp4/config.json").read_text())["quantization_config"]
    facts["config_groups"]["group_0"]["input_activations"] = given
    folder = with_tensors("ct-mxfp4", tmp_path / "it", {}, quantization_config=facts)
    assert accelpatch.load(str(folder)).model is not None


def test_inspection_says_the_groups(tmp_path: Path) -> None:
    for name, form in (
        (OSS, "1 x mxfp4_experts in rows"),
        ("ct-mxfp4", "7 x mxfp4_weight_only in groups of 32"),
    ):
        accelpatch.load(str(ROOT / name)).model.save_pretrained(tmp_path / name)
        assert form in inspect(tmp_path / name).facts["quantised"]


def test_scales_of_another_dtype_are_refused_by_a_state_dict() -> None:
    model: Any = accelpatch.load(str(ROOT / "ct-mxfp4")).model
    state = dict(model.state_dict())
    state[f"{K_PROJ}.scale"] = state[f"{K_PROJ}.scale"].float() * 1.3
    with pytest.raises(RuntimeError, match=r"scale is torch\.float32, and .* belongs to codes of e2m1"):
        model.load_state_dict(state)


def test_a_row_of_no_whole_groups(tmp_path: Path) -> None:
    folder = with_tensors(OSS, tmp_path / "it", {}, intermediate_size=48)
    with pytest.raises(LoadError, match="K = 48"):
        accelpatch.load(str(folder))
    reader = foreign.packed({"name": "mxfp4-pack-quantized"})
    assert reader is not None
    with pytest.raises(KernelError, match="weight_packed: K = 80 is no multiple of the 32 values"):
        reader.weight({"weight_packed": PACKED, "weight_scale": POWERS}, {}, 32, 80)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, kept: float) -> None:
    shutil.copytree(ROOT / OSS, tmp_path / "it")
    file = tmp_path / "it/model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(LoadError, match=r"it/model\.safetensors is truncated or damaged"):
        accelpatch.load(str(tmp_path / "it"))


def test_200_mutations_of_experts_are_read_or_refused() -> None:
    rng, reader = random.Random(2), foreign.packed({"name": "mxfp4"})
    assert reader is not None
    tensors = {part: HELD[f"{LAYER}.{part}"] for part in reader.parts}
    sizes: Any = {"number": 2, "shapes": {"gate_up_proj": (128, 32), "down_proj": (32, 64)}}
    read, said = 0, list[str]()
    for _ in range(200):
        try:
            made = reader.weight(mutated(rng, tensors), sizes, 0, 0)
            assert list(made["down_proj_q"].shape) == [2, 32, 32]
            read += 1
        except KernelError as error:
            said.append(str(error))
    assert 0 < read < 100
    assert [one for one in said if not one.startswith(reader.parts)] == []


@pytest.mark.parametrize(
    "change, name",
    [(lambda scale: scale.float().half(), OSS), (lambda scale: scale.repeat(1, 1, 2), OSS),
     (lambda scale: scale.repeat(1, 2), "ct-mxfp4")],
    ids=["another dtype", "groups of 16", "groups of 16 of a layer"],
)  # fmt: skip
def test_scales_that_are_not_of_mxfp4_are_refused_in_our_own_files(change: Any, name: str, tmp_path: Path) -> None:
    """Scales of another dtype would be read as those of other codes."""
    model: Any = accelpatch.load(str(ROOT / name)).model
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    facts = json.loads(_metadata(tmp_path / "model.safetensors")["accelpatch"])
    place = f"{LAYER}.down_proj_scale" if name == OSS else f"{K_PROJ}.scale"
    held[place] = change(held[place])
    facts["sha256"][place] = ""  # as if written so
    save_file(held, tmp_path / "model.safetensors", {"format": "pt", "accelpatch": json.dumps(facts)})
    with pytest.raises(LoadError, match=r"scale (must be finite torch\.float8_e8m0fnu|is \[32, 4\], and one for each)"):
        accelpatch.load(str(tmp_path))


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())
