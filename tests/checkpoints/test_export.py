"""What `export` writes: other tools' own bytes, and the same model through our readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import accelpatch
from accelpatch import api
from accelpatch.checkpoints.saved import digest_of
from accelpatch.errors import SaveError
from accelpatch.quant import int4
from tests.support.checkpoints import config_of, logits
from tests.support.exports import KEPT, MIXED, RECIPES, SYMMETRIC, saved

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
#: folders that others wrote, whose every byte comes back
SAME = {
    "gptq-4bit-g32": "gptq", "gptq-4bit-g128-bias": "gptq", "gptq-8bit-channel": "gptq",
    "gptq-v2-4bit-g32-asym": "gptq", "awq-gemm-4bit-g32": "awq", "awq-gemm-4bit-g32-autoawq": "awq",
    "ct-pack-w4a16-g32": "compressed-tensors", "ct-pack-w4a16-g32-asym": "compressed-tensors",
    "ct-int-w8a8": "compressed-tensors",
}  # fmt: skip
#: (recipe, format) -> (format in config.json, how far logits of our own readers may be)
TRIPS = {
    ("int4 symmetric", "gptq"): ("gptq", 1e-5), ("int4 symmetric", "awq"): ("awq", 1e-5),
    ("int4 symmetric", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("int8", "gptq"): ("gptq", 5e-3), ("int8", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("int8 by row", "gptq"): ("gptq", 5e-3), ("int8 by row", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("smoothquant", "compressed-tensors"): ("int-quantized", 1e-5),
    ("fp8", "compressed-tensors"): ("float-quantized", 1e-5),
}  # fmt: skip


def bits(tensor: Tensor) -> tuple[Any, ...]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize(("name", "to"), SAME.items(), ids=SAME)
def test_others_bytes_come_back(name: str, to: str, tmp_path: Path) -> None:
    model: Any = api.load(str(ROOT / name)).model
    model.save_pretrained(tmp_path / "ours")
    made = api.export(tmp_path / "ours", to, tmp_path / "out")
    assert made.notes == ()
    due, found = (load_file(folder / "model.safetensors") for folder in (ROOT / name, tmp_path / "out"))
    assert found.keys() == due.keys()
    for key in due:
        assert bits(found[key]) == bits(due[key]), key
    theirs, ours = (config_of(folder)["quantization_config"] for folder in (ROOT / name, tmp_path / "out"))
    words = {"bits", "zero_point"} if to == "awq" else {*ours} - {"dynamic", "config_groups"}
    words -= {"group_size"} if name == "gptq-4bit-g128-bias" else set()  # all inputs, as many as there are
    for key in words & {*theirs}:
        assert ours[key] == theirs[key], key


def test_fp8_of_others_comes_back_with_a_scale_a_row(tmp_path: Path) -> None:
    model: Any = api.load(str(ROOT / "ct-float-fp8")).model
    model.save_pretrained(tmp_path / "ours")
    api.export(tmp_path / "ours", "compressed-tensors", tmp_path / "out")
    due, found = (load_file(folder / "model.safetensors") for folder in (ROOT / "ct-float-fp8", tmp_path / "out"))
    for key in found:
        if key.endswith("_scale"):
            assert torch.equal(found[key].flatten(), due[key].flatten().expand(len(found[key])))
        else:
            assert bits(found[key]) == bits(due[key]), key


@pytest.mark.parametrize(("case", "due"), TRIPS.items(), ids=map(" to ".join, TRIPS))
def test_our_readers_see_the_same_model(case: tuple[str, str], due: tuple[str, float], tmp_path: Path) -> None:
    (recipe, to), (form, apart) = case, due
    source = saved(RECIPES.get(recipe, recipe), tmp_path / "ours")
    made = api.export(source, to)
    assert made.folder == tmp_path / f"ours-{to}"
    assert (made.format, made.layers) == (form, 14)
    assert config_of(made.folder)["quantization_config"]["quant_method"] == to
    assert config_of(made.folder)["tie_word_embeddings"] is True
    assert "lm_head is int8 in the source and float here (model.embed_tokens.weight)" in made.notes
    one, other = (logits(accelpatch.load(str(folder), dtype=torch.float32).model) for folder in (source, made.folder))
    torch.testing.assert_close(other, one, rtol=0, atol=apart * float(one.abs().max()))


@pytest.mark.parametrize(("name", "recipe"), [("opt", SYMMETRIC), ("qwen2", "smoothquant"), ("gpt_neox", "int8")],
                         ids=["opt", "qwen2", "gpt_neox"])  # fmt: skip
def test_families_with_biases_and_heads_of_their_own(name: str, recipe: Any, tmp_path: Path) -> None:
    source = saved(recipe, tmp_path / "ours", name)
    made = api.export(source, "compressed-tensors")
    one, other = (logits(accelpatch.load(str(folder), dtype=torch.float32).model) for folder in (source, made.folder))
    torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * float(one.abs().max()))


def test_groups_of_several_sizes_are_cut_and_said(tmp_path: Path) -> None:
    made = api.export(saved("int8", tmp_path / "ours"), "gptq", max_shard_size="50KB")
    assert config_of(made.folder)["quantization_config"]["group_size"] == 32
    assert "groups of 32, 64 inputs are written as groups of 32" in made.notes
    assert any(note.startswith("scales are rounded to float16, by ") for note in made.notes)
    files = {file.name for file in made.folder.iterdir()}
    assert {"config.json", "generation_config.json", "quantize_config.json", "model.safetensors.index.json"} < files
    assert made.size == sum(file.stat().st_size for file in made.folder.glob("model-*.safetensors"))


def test_layers_of_several_kinds_and_those_that_stay(tmp_path: Path) -> None:
    source = saved(MIXED, tmp_path / "ours")
    facts = config_of(api.export(source, "compressed-tensors").folder)["quantization_config"]
    down, rest = sorted(facts["config_groups"].values(), key=lambda one: one["weights"]["num_bits"])
    assert down["targets"] == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert len(rest["targets"]) == 10
    kept = [f"model.layers.{layer}.self_attn.v_proj" for layer in range(2)]
    assert facts["ignore"] == [*kept, "lm_head"]
    with pytest.raises(SaveError, match="layers of int4 and int8, and gptq has one kind"):
        api.export(source, "gptq")


def test_kept_layers_are_named_to_each_format(tmp_path: Path) -> None:
    source = saved(KEPT, tmp_path / "ours")
    kept = [f"model.layers.{layer}.self_attn.v_proj" for layer in range(2)]
    folders = [api.export(source, to).folder for to in ("gptq", "awq")]
    of_gptq, of_awq = (config_of(folder)["quantization_config"] for folder in folders)
    assert [*of_gptq["dynamic"]] == [rf"-:^model\.layers\.{layer}\.self_attn\.v_proj$" for layer in range(2)]
    assert of_awq["modules_to_not_convert"] == [*kept, "lm_head"]
    due = logits(api.load(str(source)).model)
    for folder in folders:
        torch.testing.assert_close(logits(api.load(str(folder)).model), due, rtol=0, atol=1e-5)


def test_static_scales_of_inputs_are_there(tmp_path: Path) -> None:
    source = saved("smoothquant-static", tmp_path / "ours")
    made = api.export(source, "compressed-tensors")
    due = {name for name in load_file(source / "model.safetensors") if name.endswith(".input_scale")}
    found = load_file(made.folder / "model.safetensors")
    assert {name for name in found if name.endswith(".input_scale")} == due != set()
    groups = config_of(made.folder)["quantization_config"]["config_groups"].values()
    (static,) = [one for one in groups if not one["input_activations"]["dynamic"]]
    assert static["targets"] == ["Linear"] or {f"{name}.input_scale" for name in static["targets"]} == due


def fields(words: Tensor) -> Tensor:
    """Four-bit fields [rows, 8 words] of words, the low one first."""
    return torch.stack([(words >> 4 * field) & 15 for field in range(8)], dim=2).flatten(1).to(torch.int8)


def test_integer_zero_points_and_sorted_columns_are_taken(tmp_path: Path) -> None:
    """As readers of act-order hold them: the offset in integers, and the input of each column."""
    source = saved(SYMMETRIC, tmp_path / "ours")
    file, path = source / "model.safetensors", "model.layers.0.self_attn.k_proj"
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors, facts = load_file(file), json.loads(metadata["accelpatch"])
    zero, order = torch.tensor([[3, 15]], dtype=torch.int8).repeat(32, 1), torch.arange(64, dtype=torch.int32).flip(0)
    for name, tensor in (("offset", zero), ("order", order)):
        tensors[f"{path}.{name}"], facts["sha256"][f"{path}.{name}"] = tensor, digest_of(tensor)
    save_file(tensors, file, metadata | {"accelpatch": json.dumps(facts)})
    due = int4.unpack(tensors[f"{path}.q"]).flip(1) - zero.repeat_interleave(32, dim=1).flip(1)
    facts = config_of(api.export(source, "gptq").folder)["quantization_config"]
    assert (facts["checkpoint_format"], facts["sym"], facts["desc_act"]) == ("gptq_v2", False, True)
    found = load_file(tmp_path / "ours-gptq/model.safetensors")
    made = {part: found[f"{path}.{part}"] for part in ("qweight", "qzeros", "g_idx")}
    assert made["g_idx"].tolist() == [1] * 32 + [0] * 32
    codes = fields(made["qweight"].t())
    zeros = fields(made["qzeros"]).t()[:, made["g_idx"].long()]
    assert torch.equal(codes - zeros, due)
    with pytest.raises(SaveError, match="sorted by act-order, which awq does not have"):
        api.export(source, "awq")
    form = api.export(source, "compressed-tensors").folder
    assert config_of(form)["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    assert torch.equal(load_file(form / "model.safetensors")[f"{path}.weight_g_idx"], made["g_idx"])


def test_small_files_go_along_and_weights_and_code_do_not(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    for name in ("tokenizer.json", "chat_template.jinja", "old.bin", "modeling.py", ".hidden", "SHA256SUMS.old"):
        (source / name).write_text(name)
    (source / "nested").mkdir()
    made = api.export(source, "awq")
    assert {file.name for file in made.folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
        "SHA256SUMS.old",
    }  # fmt: skip
