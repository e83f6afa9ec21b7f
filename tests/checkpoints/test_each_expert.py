"""Experts of checkpoints that have each one's layers for themselves, in FP8 blocks and in NVFP4: as DeepSeek-V3,
Qwen3-MoE and ModelOpt publish them. Codes and scales are made here, by the published definitions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError, LoadError
from accelpatch.quant import fp8_blocks
from accelpatch.quant.each_expert import each_expert
from tests.checkpoints.test_fp8_blocks import by_definition, unpacked
from tests.support.tiny import EXPERTS, full_batch

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "mlp_only_layers": [], "num_experts": 3}
LAYER = "model.layers.1.mlp.experts"
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TENSORS = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8_block_experts", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "modelopt": ("nvfp4_experts", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "compressed-tensors": ("nvfp4_experts", {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": TENSORS}},
    }),
}  # fmt: skip


def in_nvfp4(weight: Tensor, divides: bool) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a layer, the weight that they stand for): the nearest codes, one float for all."""
    groups = weight.double().unflatten(1, (-1, 16))
    whole = (groups.abs().max() / (6 * 448)).float()
    scales = (groups.abs().amax(2) / 6 / whole.double()).float().to(torch.float8_e4m3fn)
    given = (1 / whole).reshape(1) if divides else whole
    factor = 1 / given.double() if divides else given.double()
    by = scales.double() * factor
    size = (groups.abs() / by[:, :, None].clamp(min=1e-30))[..., None] - MAGNITUDES.double()
    codes = size.abs().argmin(-1).flatten(1) + 8 * (groups < 0).flatten(1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = MAGNITUDES.double()[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    made = (values.unflatten(1, (-1, 16)) * by.float().double()[:, :, None]).flatten(1).float()
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    names = names if divides else ("weight", "weight_scale", "weight_scale_2")
    return dict(zip(names, (packed, scales, given), strict=True)), made


def layer_of(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a layer, the weight that they stand for)."""
    if kind == "fp8":
        codes, scales = by_definition(weight)
        return {"weight": codes, "weight_scale_inv": scales}, unpacked(codes, scales)
    return in_nvfp4(weight, kind == "compressed-tensors")


@torch.no_grad()
def written(folder: Path, kind: str) -> Any:
    """Writes a checkpoint whose experts are in a format, all else in floats; the float model of the same weights."""
    model: Any = EXPERTS["qwen3_moe"].make(**SIZES)
    tensors = {name: one.clone() for name, one in model.state_dict().items() if ".experts." not in name}
    for at, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for number in range(SIZES["num_experts"]):  # type: ignore[call-overload]
            gate, up = experts.gate_up_proj[number].chunk(2)
            up.mul_(3)  # scales of gate and up differ
            for name, weight in (("gate", gate), ("up", up), ("down", experts.down_proj[number])):
                held, full = layer_of(kind, weight)
                weight.copy_(full)
                path = f"model.layers.{at}.mlp.experts.{number}.{name}_proj"
                tensors |= {f"{path}.{part}": one for part, one in held.items()}
    folder.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind][1]}))
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_of_the_definition_saved_and_loaded_again(kind: str, tmp_path: Path) -> None:
    plain = written(tmp_path / "theirs", kind)
    model: Any = accelpatch.load(str(tmp_path / "theirs"), dtype=torch.float32).model
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert [site.replacer for site in report.sites].count(CONFIGS[kind][0]) == 2
    for name in ("gate_up_proj", "down_proj"):
        found = torch.as_tensor(getattr(model.get_submodule(LAYER), name))
        assert torch.equal(found, getattr(plain.get_submodule(LAYER), name))
    ids = full_batch()["input_ids"]
    due = model(ids).logits
    torch.testing.assert_close(due, plain(ids).logits, rtol=0, atol=2e-4)
    model.save_pretrained(tmp_path / "ours")
    again: Any = accelpatch.load(str(tmp_path / "ours"), dtype=torch.float32).model
    assert torch.equal(again(ids).logits, due)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_plan_fuses_its_layers_on_a_gpu(kind: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.kernels.triton import launch
    from accelpatch.recipe.recipe import parse

    monkeypatch.setattr(launch, "_installed", lambda: True)
    rule = f"rules: [{{name: experts, replace: {CONFIGS[kind][0]}, options: {{}}}}]"
    recipe = parse(f"{{name: x, extends: int8, {rule}}}")
    plan = accelpatch.plan(EXPERTS["qwen3_moe"].make(torch.bfloat16, **SIZES), recipe, device=KNOWN[arch])
    sites = plan.report().sites
    assert [site.fused for site in sites if site.role == "layer"] == [True, True]
    assert {site.kernel for site in sites if site.role == "experts"} == {"triton"}


def nan(scales: Tensor) -> Tensor:
    found = scales.clone()
    found.view(torch.uint8).view(-1)[-1] = 0x7F if found.element_size() == 1 else 0xFF
    return found if found.element_size() == 1 else torch.full_like(scales, float("nan"))


BAD: dict[str, tuple[str, str, Any, str]] = {
    "a scale that is nan": ("fp8", "2.up_proj.weight_scale_inv", nan, "2.up_proj.weight_scale_inv[0, 0] is nan"),
    "a code that is nan": ("fp8", "1.down_proj.weight", nan, "1.down_proj.weight[127, 127] is NaN"),
    "no scale": ("fp8", "0.gate_proj.weight_scale_inv", None, "0.gate_proj.weight_scale_inv is missing"),
    "no codes": ("modelopt", "2.down_proj.weight", None, "2.down_proj.weight is missing"),
    "half of the codes": ("modelopt", "1.up_proj.weight", lambda one: one[:64].clone(), "1.up_proj.weight is torch."),
    "no scale of all": ("modelopt", "1.up_proj.weight_scale_2", None, "1.up_proj.weight_scale_2 is missing"),
    "a scale of all that is zero": (
        "compressed-tensors", "0.down_proj.weight_global_scale", torch.zeros_like, "weight_global_scale is 0.0",
    ),
    "an expert too many": ("fp8", "3.up_proj.weight", torch.zeros(128, 128), "is of none of the 3 experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damage_is_refused_by_file_and_tensor(case: str, tmp_path: Path) -> None:
    kind, name, change, words = BAD[case]
    written(tmp_path / "it", kind)
    file = tmp_path / "it/model.safetensors"
    held, path = load_file(file), f"{LAYER}.{name}"
    if change is None:
        del held[path]
    else:
        held[path] = change if isinstance(change, Tensor) else change(held[path])
    save_file(held, file)
    with pytest.raises(LoadError) as caught:
        accelpatch.load(str(tmp_path / "it"))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert path in str(caught.value) or "missing" in words


def test_random_changes_are_read_or_refused_in_words() -> None:
    """Tensors of other shapes and dtypes, and missing ones, never end in another error."""
    sizes = {"number": 2, "shapes": {"gate_up_proj": (256, 128), "down_proj": (128, 128)}}
    due = {
        f"{number}.{name}_proj.{part}": one
        for number in range(2)
        for name in ("gate", "up", "down")
        for part, one in layer_of("fp8", torch.randn(128, 128))[0].items()
    }
    draw, refused, same = random.Random(1), 0, 0
    for _ in range(60):
        held = dict(due)
        name = draw.choice([*held])
        changes = (None, held[name][:1], held[name].float(), held[name].view(torch.uint8), held[name][None])
        held[name] = draw.choice(changes)  # type: ignore[assignment]
        if held[name] is None:
            del held[name]
        try:
            each_expert(fp8_blocks.blocks, held, sizes)
        except KernelError as error:
            refused += str(error).startswith(name.rpartition(".")[0])
        else:
            same += all(torch.equal(held[name].float(), one.float()) for name, one in due.items())
    assert refused > 30
    assert refused + same == 60
