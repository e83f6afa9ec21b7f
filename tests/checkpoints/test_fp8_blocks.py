"""FP8 in blocks of 128 x 128: as transformers writes it, with smaller last blocks, saved, exported, undone, refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import accelpatch
from accelpatch.checkpoints import foreign
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError, LoadError
from accelpatch.kernels.ops.linear.by_layout import dequantized
from accelpatch.quant import fp8
from tests.checkpoints.test_foreign_mutations import mutated

Q_PROJ = "model.layers.0.self_attn.q_proj"
IDS = torch.tensor([[1, 17, 30, 5, 23, 29, 8, 11]])


def tiny(hidden: int, inner: int) -> LlamaForCausalLM:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=hidden // 2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def by_definition(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and the scales of their blocks, block by block."""
    codes, rows = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), []
    for top in range(0, weight.shape[0], 128):
        row = []
        for left in range(0, weight.shape[1], 128):
            block = weight[top : top + 128, left : left + 128]
            row.append(block.abs().max().item() / 448)
            codes[top : top + 128, left : left + 128] = (block / row[-1]).to(torch.float8_e4m3fn)
        rows.append(row)
    return codes, torch.tensor(rows)


def unpacked(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight by the definition, element by element in float64, rounded once to float32."""
    out = codes.double()
    for i, row in enumerate(scales.tolist()):
        for j, scale in enumerate(row):
            out[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale
    return out.float()


@torch.no_grad()
def written(folder: Path, model: LlamaForCausalLM, theirs: bool) -> Path:
    """A checkpoint, by transformers' own code, which takes whole blocks alone, or by the definition."""
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    writer = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            name = f"{path}.weight"
            if theirs:
                tensors |= writer._quantize_one(name, tensors[name])
            else:
                tensors[name], tensors[f"{path}.weight_scale_inv"] = by_definition(tensors[name])
    folder.mkdir()
    save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def test_weights_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    original = tiny(256, 384)
    folder = written(tmp_path / "theirs", original, theirs=True)
    held, reader = load_file(folder / "model.safetensors"), Fp8Dequantize(None)
    for path, module in original.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            codes, scales = held[f"{path}.weight"], held[f"{path}.weight_scale_inv"]
            module.weight.copy_(reader._dequantize_one(codes, scales, torch.float32))
    model: Any = accelpatch.load(str(folder), dtype=torch.float32).model
    assert {site.path: site.replacer for site in model.accelpatch.report().sites}[Q_PROJ] == "fp8_blocks"
    assert model.accelpatch.report().verification.failures == []
    assert torch.equal(torch.as_tensor(model.get_submodule(Q_PROJ).weight), original.get_submodule(Q_PROJ).weight)
    torch.testing.assert_close(model(IDS).logits, original(IDS).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_last_blocks_may_be_smaller_and_it_is_saved_as_ours(tmp_path: Path) -> None:
    folder = written(tmp_path / "parts", tiny(144, 200), theirs=False)
    held = load_file(folder / "model.safetensors")
    model: Any = accelpatch.load(str(folder), dtype=torch.float32).model
    for path in (Q_PROJ, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"):
        due = unpacked(held[f"{path}.weight"], held[f"{path}.weight_scale_inv"])
        assert torch.equal(torch.as_tensor(model.get_submodule(path).weight), due)
    model.save_pretrained(tmp_path / "ours")
    again: Any = accelpatch.load(str(tmp_path / "ours"), dtype=torch.float32).model
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert torch.equal(
        load_file(tmp_path / "ours/model.safetensors")[f"{Q_PROJ}.q"].view(torch.uint8),
        held[f"{Q_PROJ}.weight"].view(torch.uint8),
    )


def test_it_is_exported_bit_for_bit(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", tiny(144, 200), theirs=False)
    model: Any = accelpatch.load(str(folder), dtype=torch.float32).model
    model.save_pretrained(tmp_path / "ours")
    assert accelpatch.export(tmp_path / "ours", "fp8", tmp_path / "again").format == "fp8"
    held, due = (load_file(one / "model.safetensors") for one in (tmp_path / "again", folder))
    assert held.keys() == due.keys()
    assert all(torch.equal(held[name].float(), one.float()) for name, one in due.items())
    again: Any = accelpatch.load(str(tmp_path / "again"), dtype=torch.float32).model
    assert torch.equal(again(IDS).logits, model(IDS).logits)


RECIPE = "{name: blocks, extends: int8, rules: [{name: linear, replace: fp8_blocks, options: OPTIONS}]}"


@torch.no_grad()
@pytest.mark.parametrize("activations", [False, True], ids=["weights", "activations too"])
def test_a_float_model_is_patched_and_undone(activations: bool) -> None:
    model: Any = tiny(256, 384)
    due, before = model(IDS).logits, {name: one.clone() for name, one in model.state_dict().items()}
    text = RECIPE.replace("OPTIONS", f"{{activations: {str(activations).lower()}}}")
    accelpatch.patch(model, accelpatch.recipe.recipe.parse(text))
    report = model.accelpatch.report()
    assert [site.replacer for site in report.sites].count("fp8_blocks") == 7
    assert report.verification.failures == []
    layer, x = model.get_submodule(Q_PROJ), torch.randn(3, 256)
    wanted = fp8.rounded(x) if activations else x
    torch.testing.assert_close(layer(x), wanted @ dequantized(layer.layout, torch.float32).T, rtol=1e-5, atol=1e-6)
    assert 0 < (model(IDS).logits - due).abs().max() < 0.1
    accelpatch.unpatch(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@torch.no_grad()
def test_activations_of_a_saved_model_are_rounded_where_its_recipe_says_so(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", tiny(144, 200), theirs=False)
    model: Any = accelpatch.load(str(folder), dtype=torch.float32).model
    model.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours/config.json").read_text())
    given = config["quantization_config"]
    text = given["recipe"].replace("replace: fp8_blocks", "replace: fp8_blocks\n  options: {activations: true}")
    assert text != given["recipe"]
    given["recipe"] = text
    (tmp_path / "ours/config.json").write_text(json.dumps(config))
    again: Any = accelpatch.load(str(tmp_path / "ours"), dtype=torch.float32).model
    layer, x = again.get_submodule(Q_PROJ), torch.randn(3, 144)
    assert layer.layout.rounds
    assert torch.equal(layer(x), model.get_submodule(Q_PROJ)(fp8.rounded(x)))


@torch.no_grad()
@pytest.mark.parametrize("k", [128, 256], ids=["one scale a row", "two"])
def test_what_is_written_into_a_weight_lies_in_blocks_and_its_input_stays_rounded(k: int) -> None:
    model: Any = tiny(k, 384)
    text = RECIPE.replace("OPTIONS", "{activations: true}")
    accelpatch.patch(model, accelpatch.recipe.recipe.parse(text), verify=False)
    layer, new = model.get_submodule(Q_PROJ), torch.randn(k, k)
    layer.weight.data.copy_(new)
    codes, scales = by_definition(new)
    assert layer.layout.rounds
    assert torch.equal(layer.layout.scale[::128], scales)
    assert torch.equal(layer.layout.w.view(torch.uint8), codes.view(torch.uint8))


@torch.no_grad()
def test_blocks_of_zeros_are_exported_with_a_scale_that_readers_take(tmp_path: Path) -> None:
    original: Any = tiny(256, 384)
    original.get_submodule(Q_PROJ).weight[:128, 128:] = 0
    model = accelpatch.patch(original, accelpatch.recipe.recipe.parse(RECIPE.replace("OPTIONS", "{}")), verify=False)
    model.save_pretrained(tmp_path / "ours")
    accelpatch.export(tmp_path / "ours", "fp8", tmp_path / "theirs")
    assert load_file(tmp_path / "theirs/model.safetensors")[f"{Q_PROJ}.weight_scale_inv"][0, 1] == 1
    again: Any = accelpatch.load(str(tmp_path / "theirs"), dtype=torch.float32).model
    weights = (torch.as_tensor(one.get_submodule(Q_PROJ).weight) for one in (again, model))
    assert torch.equal(*weights)


def test_activations_are_rounded_by_deepseeks_definition() -> None:
    x = torch.randn(5, 300) * torch.logspace(-3, 3, 300)
    for row, made in zip(x, fp8.rounded(x), strict=True):
        for left in range(0, 300, 128):
            group = row[left : left + 128]
            scale = group.abs().max() / 448
            assert torch.equal(made[left : left + 128], (group / scale).to(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(fp8.rounded(torch.zeros(2, 128)), torch.zeros(2, 128))


def test_blocks_of_floats() -> None:
    weight = torch.randn(200, 300)
    codes, scales = by_definition(weight)
    held = fp8.quantize_blocks(weight)
    assert torch.equal(held.scale[::128], scales)
    assert torch.equal(held.scale, scales.repeat_interleave(128, 0)[:200])
    assert torch.equal(held.w.view(torch.uint8), codes.view(torch.uint8))


BAD: dict[str, tuple[str, Any, str]] = {
    "nan": ("weight_scale_inv", lambda one: one * float("nan"), "weight_scale_inv[0, 0] is nan"),
    "zero": ("weight_scale_inv", lambda one: one * 0, "weight_scale_inv[0, 0] is 0.0, and a scale is above zero"),
    "negative": ("weight_scale_inv", lambda one: -one, "weight_scale_inv[0, 0] is -"),
    "shape": ("weight_scale_inv", lambda one: one[:1].clone(), "weight_scale_inv is torch.float32 [1, 2], and float32"),
    "of-rows": ("weight_scale_inv", lambda one: torch.ones(144, 1), "weight_scale_inv is torch.float32 [144, 1]"),
    "codes": ("weight", lambda one: one.float().to(torch.float8_e5m2), "weight is torch.float8_e5m2"),
    "codes-nan": ("weight", lambda one: (one.view(torch.uint8) | 127).view(one.dtype), "weight[0, 0] is NaN"),
}  # fmt: skip


@pytest.mark.parametrize("part, change, message", BAD.values(), ids=BAD.keys())
def test_damage_is_refused_by_file_and_tensor(part: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "it", tiny(144, 200), theirs=False)
    held = load_file(folder / "model.safetensors")
    held[f"{Q_PROJ}.{part}"] = change(held[f"{Q_PROJ}.{part}"])
    save_file(held, folder / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        accelpatch.load(str(folder))
    assert f"{folder / 'model.safetensors'}: {Q_PROJ}.{message}" in str(caught.value)


def test_other_blocks_are_refused_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path / "it", tiny(144, 200), theirs=False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"fp8 with weight_block_size \[64, 64\] is not read here"):
        accelpatch.load(str(folder))


def test_300_mutations_are_read_or_refused() -> None:
    rng, reader = random.Random(6), foreign.packed({"name": "fp8"})
    assert reader is not None
    codes, scales = by_definition(torch.randn(144, 200))
    read, said = 0, list[str]()
    for _ in range(300):
        try:
            made = reader.weight(mutated(rng, {"weight": codes, "weight_scale_inv": scales}), {}, 144, 200)
            assert (made.n, made.k) == (144, 200)
            read += 1
        except KernelError as error:
            said.append(str(error))
    assert 0 < read < 200
    assert [one for one in said if not one.startswith(("weight", "weight_scale_inv"))] == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx90a", "sm_90"])
def test_plans_of_a_gpu(arch: str) -> None:
    """The form is e4m3fn on every GPU: nothing is multiplied by matrix units for 8-bit floats."""
    recipe = accelpatch.recipe.recipe.parse(RECIPE.replace("OPTIONS", "{}"))
    plan = accelpatch.plan(tiny(256, 384).bfloat16(), recipe, device=KNOWN[arch])
    row = next(line for line in str(plan).splitlines() if "q_proj" in line)
    assert "fp8_blocks" in row
    assert "hip" in row
