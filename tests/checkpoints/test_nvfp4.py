"""NVFP4 as compressed-tensors and as ModelOpt have it: kept scales, saved, exported, fused, refused."""

from __future__ import annotations

import random
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import accelpatch
from accelpatch.checkpoints import foreign
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError, LoadError
from tests.checkpoints.test_foreign_mutations import mutated
from tests.checkpoints.test_mxfp4 import with_tensors
from tests.support.foreign import K_PROJ, ROOT, expected
from tests.support.simulated import greedy
from tests.support.tiny import CAUSAL, padded_batch, snapshot

CT, MODELOPT = "ct-nvfp4", "modelopt-nvfp4"
NAMES = {  # codes, scales, the scale of all, that of the input
    CT: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
HELD = {name: load_file(ROOT / name / "model.safetensors") for name in NAMES}
MAGNITUDES = [Fraction(one) for one in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def of_definition(name: str, path: str, row: int, k: int) -> Fraction:
    """A weight by the published definition, exactly: code times scale, divided by or times the scale of all."""
    codes, scales, whole, _ = (HELD[name].get(f"{path}.{part}") for part in NAMES[name])
    byte = int(codes[row, k // 2])
    code = byte >> 4 if k % 2 else byte & 15
    bits = int(scales.view(torch.uint8)[row, k // 16])
    exponent, fraction = bits >> 3 & 15, bits & 7
    scale = (Fraction(fraction, 8) + (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 7)
    scale = -scale if bits & 128 else scale
    both = scale / Fraction(whole.item()) if name == CT else scale * Fraction(whole.item())
    return (-1 if code & 8 else 1) * MAGNITUDES[code & 7] * both


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_definition_in_each_layer(name: str) -> None:
    model: Any = accelpatch.load(str(ROOT / name), dtype=torch.float32).model
    rng = random.Random(3)
    paths = [f"model.layers.0.self_attn.{one}_proj" for one in "qkvo"]
    paths += [f"model.layers.0.mlp.{one}_proj" for one in ("gate", "up", "down")]
    assert len({HELD[name][f"{path}.{NAMES[name][2]}"].item() for path in paths}) > 4
    for path in paths:
        weight = torch.as_tensor(model.get_submodule(path).weight)
        for _ in range(60):
            row, k = rng.randrange(weight.shape[0]), rng.randrange(weight.shape[1])
            exact, made = of_definition(name, path, row, k), weight[row, k].item()
            assert abs(Fraction(made) - exact) <= abs(exact) / 2**23  # two roundings of float32


@pytest.mark.parametrize("name", NAMES)
def test_it_is_saved_as_ours_with_the_scales_of_inputs(name: str, tmp_path: Path) -> None:
    model: Any = accelpatch.load(str(ROOT / name)).model
    model.save_pretrained(tmp_path)
    held, given = load_file(tmp_path / "model.safetensors"), HELD[name]
    codes, scales, whole, inputs = (given[f"{K_PROJ}.{part}"] for part in NAMES[name])
    assert torch.equal(held[f"{K_PROJ}.q"].view(torch.uint8), codes)
    assert torch.equal(held[f"{K_PROJ}.scale"].view(torch.uint8), scales.view(torch.uint8))
    factor = whole.double().reciprocal() if name == CT else whole.double()
    assert held[f"{K_PROJ}.offset"].eq(factor).all()
    due = inputs.reciprocal() if name == CT else inputs
    assert torch.equal(held[f"{K_PROJ}.input_scale"], due.reshape(1))
    again: Any = accelpatch.load(str(tmp_path)).model
    ids = expected(name)["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    again.half()
    assert again.get_submodule(K_PROJ).input_scale.dtype == torch.float32


@pytest.mark.parametrize("value", [torch.ones(5), torch.tensor([float("nan")]), torch.zeros(1)], ids=str)
def test_a_damaged_scale_of_its_input_is_refused(value: Tensor, tmp_path: Path) -> None:
    model: Any = accelpatch.load(str(ROOT / CT)).model
    model.get_submodule(K_PROJ).input_scale = value
    model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=rf"model.safetensors: {K_PROJ}.input_scale is torch.float32 "):
        accelpatch.load(str(tmp_path))


@torch.no_grad()
def test_the_scale_of_its_input_stays_where_the_weight_is_written() -> None:
    model: Any = accelpatch.load(str(ROOT / CT)).model
    layer, kept = model.get_submodule(K_PROJ), {name: one.clone() for name, one in model.state_dict().items()}
    due, before = layer.input_scale.clone(), torch.as_tensor(layer.weight).clone()
    layer.weight.data.mul_(2)
    assert torch.equal(layer.state_dict()["input_scale"], due)
    model.load_state_dict(kept)
    assert torch.equal(torch.as_tensor(layer.weight), before)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_exported_to_the_same_codes_and_scales(name: str, tmp_path: Path) -> None:
    model: Any = accelpatch.load(str(ROOT / name)).model
    model.save_pretrained(tmp_path / "ours")
    done = accelpatch.export(tmp_path / "ours", "compressed-tensors", tmp_path / "theirs")
    assert done.format == "nvfp4-pack-quantized"
    assert any("scales of inputs are left out" in one for one in done.notes)
    held, (codes, scales, whole, _) = load_file(tmp_path / "theirs/model.safetensors"), NAMES[name]
    assert torch.equal(held[f"{K_PROJ}.weight_packed"], HELD[name][f"{K_PROJ}.{codes}"])
    assert torch.equal(held[f"{K_PROJ}.weight_scale"].float(), HELD[name][f"{K_PROJ}.{scales}"].float())
    given = HELD[name][f"{K_PROJ}.{whole}"]
    assert torch.equal(held[f"{K_PROJ}.weight_global_scale"], (given if name == CT else given.reciprocal()).reshape(1))
    again: Any = accelpatch.load(str(tmp_path / "theirs")).model
    ids = expected(name)["input_ids"]
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_a_float_model_is_patched_runs_native_steps_and_is_undone() -> None:
    recipe = accelpatch.recipe.recipe.parse(
        "{name: nvfp4, extends: int4, rules: [{name: linear, replace: nvfp4_weight_only, options: {}}]}"
    )
    model: Any = CAUSAL["llama"].make()
    before = snapshot(model)
    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    assert [site.replacer for site in report.sites].count("nvfp4_weight_only") == 14
    assert report.verification.failures == []
    greedy(model, padded_batch())
    assert model.accelpatch.report().paths["native step"] > 0
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def of(name: str, part: int, value: Tensor | None) -> dict[str, Tensor | None]:
    return {f"{K_PROJ}.{NAMES[name][part]}": value}


def held(name: str, part: int) -> Tensor:
    return HELD[name][f"{K_PROJ}.{NAMES[name][part]}"].clone()


def with_byte(tensor: Tensor, value: int) -> Tensor:
    found = tensor.clone()
    found.view(torch.uint8).view(-1)[9] = value
    return found


BAD: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "scale-nan": (CT, of(CT, 1, with_byte(held(CT, 1), 0x7F)), "weight_scale[2, 1] is NaN"),
    "scale-zero": (CT, of(CT, 1, held(CT, 1).float().mul(0).to(torch.float8_e4m3fn)), "weight_scale has a zero where"),
    "scale-shape": (CT, of(CT, 1, held(CT, 1)[:, :2].clone()), "weight_scale is torch.float8_e4m3fn [32, 2]"),
    "scale-of-mxfp4": (MODELOPT, of(MODELOPT, 1, held(MODELOPT, 1).view(torch.uint8)), "weight_scale is torch.uint8"),
    "whole-nan": (CT, of(CT, 2, torch.tensor([float("nan")])), "weight_global_scale is nan"),
    "whole-zero": (MODELOPT, of(MODELOPT, 2, torch.tensor(0.0)), "weight_scale_2 is 0.0"),
    "whole-negative": (MODELOPT, of(MODELOPT, 2, torch.tensor(-1e-3)), "weight_scale_2 is -0.00"),
    "whole-of-rows": (CT, of(CT, 2, torch.ones(32)), "weight_global_scale is torch.float32 [32], and one number"),
    "whole-missing": (CT, of(CT, 2, None), "weight_global_scale is missing"),
    "neither-way": (CT, of(CT, 2, torch.tensor([1e-35])), "weight_global_scale is 1e-35, and neither"),
    "input-zero": (MODELOPT, of(MODELOPT, 3, torch.tensor(0.0)), "input_scale is 0.0, and a scale is above zero"),
    "codes-shape": (CT, of(CT, 0, held(CT, 0).view(torch.int32)), "weight_packed is torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("name, changes, message", BAD.values(), ids=BAD.keys())
def test_damage_is_refused_by_file_and_tensor(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = with_tensors(name, tmp_path / "it", changes)
    with pytest.raises(LoadError) as caught:
        accelpatch.load(str(folder))
    assert f"{K_PROJ}.{message}" in str(caught.value)
    assert str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_other_librarys_convention_is_found_by_the_size_of_weights(name: str, tmp_path: Path) -> None:
    """Scales of all that are the inverse of what their name says: weights of 1e7 are not plausible."""
    changes = {key: one.reciprocal() for key, one in HELD[name].items() if key.endswith(NAMES[name][2])}
    other: Any = accelpatch.load(str(with_tensors(name, tmp_path / "it", changes))).model
    right: Any = accelpatch.load(str(ROOT / name)).model
    ids = expected(name)["input_ids"]
    torch.testing.assert_close(other(ids).logits, right(ids).logits)


def test_another_algorithm_of_modelopt_is_refused_by_name(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    folder = with_tensors(MODELOPT, tmp_path / "it", {}, quantization_config=config)
    with pytest.raises(LoadError, match="modelopt with quant_algo 'FP8' is not read here"):
        accelpatch.load(str(folder))


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, kept: float) -> None:
    shutil.copytree(ROOT / CT, tmp_path / "it")
    file = tmp_path / "it/model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(LoadError, match=r"it/model\.safetensors is truncated or damaged"):
        accelpatch.load(str(tmp_path / "it"))


@pytest.mark.parametrize("name, layout", [(CT, "nvfp4-pack-quantized"), (MODELOPT, "modelopt")])
def test_300_mutations_are_read_or_refused(name: str, layout: str) -> None:
    rng, reader = random.Random(5), foreign.packed({"name": layout})
    assert reader is not None
    tensors = {part: HELD[name][f"{K_PROJ}.{part}"] for part in NAMES[name]}
    read, said = 0, list[str]()
    for _ in range(300):
        try:
            made = reader.weight(mutated(rng, tensors), {}, 32, 64)
            assert (made.n, made.k) == (32, 64)
            read += 1
        except KernelError as error:
            said.append(str(error))
    assert 0 < read < 200
    assert [one for one in said if not one.startswith(NAMES[name])] == []


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_plans_of_a_gpu(arch: str) -> None:
    model: Any = accelpatch.load(str(ROOT / MODELOPT)).model
    assert model is not None
    recipe = accelpatch.recipe.recipe.parse(
        "{name: nvfp4, extends: int4, rules: [{name: linear, replace: nvfp4_weight_only, options: {}}]}"
    )
    plan = accelpatch.plan(CAUSAL["llama"].make(torch.bfloat16), recipe, device=KNOWN[arch])
    assert "nvfp4_weight_only" in str(plan)
