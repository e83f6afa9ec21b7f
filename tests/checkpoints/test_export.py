"""What `export` writes: other tools' own bytes, the same model through our readers and theirs, or a refusal."""

from __future__ import annotations

import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import accelpatch
from accelpatch import api
from accelpatch.checkpoints import writing
from accelpatch.errors import LoadError, SaveError
from accelpatch.recipe.recipe import parse
from tests.support.checkpoints import config_of, digests, logits
from tests.support.smoothing import calibrated
from tests.support.tiny import CAUSAL

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
#: folders that others wrote, whose every byte comes back
SAME = {
    "gptq-4bit-g32": "gptq", "gptq-4bit-g128-bias": "gptq", "gptq-8bit-channel": "gptq",
    "gptq-v2-4bit-g32-asym": "gptq", "awq-gemm-4bit-g32": "awq", "awq-gemm-4bit-g32-autoawq": "awq",
    "ct-pack-w4a16-g32": "compressed-tensors", "ct-pack-w4a16-g32-asym": "compressed-tensors",
    "ct-int-w8a8": "compressed-tensors",
}  # fmt: skip
SYMMETRIC = parse("""name: int4-symmetric
extends: int4
rules:
  - name: linear
    options: {symmetric: true, group_size: [32]}
""")
BY_ROW = parse("""name: int8-rows
extends: int8
rules:
  - name: linear
    options: {group_size: null}
""")
FP8_WEIGHTS = parse("""name: fp8-weights
extends: int8
rules:
  - name: linear
    replace: fp8_weight_only
""")
MIXED = parse("""name: mixed
extends: int8
rules:
  - name: down
    match: {name: "*down_proj"}
    replace: int4_weight_only
    options: {group_size: [32], symmetric: true}
  - name: value
    match: {name: "*v_proj"}
    replace: keep
""")
KEPT = parse("""name: kept
extends: int4
rules:
  - name: value
    match: {name: "*v_proj"}
    replace: keep
  - name: linear
    options: {symmetric: true, group_size: [32]}
""")
RECIPES = {"int4 symmetric": SYMMETRIC, "int8 by row": BY_ROW, "fp8 weights": FP8_WEIGHTS, "mixed": MIXED, "kept": KEPT}
#: (recipe, format) -> (format in config.json, how far logits of our own readers may be)
TRIPS = {
    ("int4 symmetric", "gptq"): ("gptq", 1e-5), ("int4 symmetric", "awq"): ("awq", 1e-5),
    ("int4 symmetric", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("int8", "gptq"): ("gptq", 5e-3), ("int8", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("int8 by row", "gptq"): ("gptq", 5e-3), ("int8 by row", "compressed-tensors"): ("pack-quantized", 1e-5),
    ("smoothquant", "compressed-tensors"): ("int-quantized", 1e-5),
    ("fp8", "compressed-tensors"): ("float-quantized", 1e-5),
}  # fmt: skip


def saved(recipe: Any, folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A folder with a tiny model, patched by a recipe."""
    model: Any = CAUSAL[name].make(dtype)
    smooths = isinstance(recipe, str) and recipe.startswith("smoothquant")
    accelpatch.patch(model, recipe, verify=False, **({"statistics": calibrated(model)} if smooths else {}))
    model.save_pretrained(folder)
    return folder


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
    of_gptq, of_awq = (config_of(api.export(source, to).folder)["quantization_config"] for to in ("gptq", "awq"))
    assert [*of_gptq["dynamic"]] == [rf"-:^model\.layers\.{layer}\.self_attn\.v_proj$" for layer in range(2)]
    assert of_awq["modules_to_not_convert"] == [*kept, "lm_head"]


def test_static_scales_of_inputs_are_there(tmp_path: Path) -> None:
    source = saved("smoothquant-static", tmp_path / "ours")
    made = api.export(source, "compressed-tensors")
    due = {name for name in load_file(source / "model.safetensors") if name.endswith(".input_scale")}
    found = load_file(made.folder / "model.safetensors")
    assert {name for name in found if name.endswith(".input_scale")} == due != set()
    groups = config_of(made.folder)["quantization_config"]["config_groups"].values()
    (static,) = [one for one in groups if not one["input_activations"]["dynamic"]]
    assert static["targets"] == ["Linear"] or {f"{name}.input_scale" for name in static["targets"]} == due


REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "float minima": ("int4", "llama", "gptq", "has float minima, and other formats have integer zero points"),
    "names the option": ("int4", "llama", "compressed-tensors", "options: {symmetric: true}"),
    "8 bits in awq": ("int8", "llama", "awq", "is int8, and awq holds int4: compressed-tensors and gptq do"),
    "w8a8 in gptq": ("smoothquant", "llama", "gptq", "is w8a8, and gptq holds int4, int8: compressed-tensors does"),
    "fp8 in awq": ("fp8", "llama", "awq", "is fp8, and awq holds int4"),
    "nothing quantised": ("exact", "llama", "gptq", "no quantised linear layer (recipe exact)"),
    "whole layers": ("smoothquant-opt", "opt", "compressed-tensors", "is replaced by int8_opt"),
    "Conv1D": ("int8", "gpt2", "compressed-tensors", "is no nn.Linear but Conv1D"),
    "experts": ("int8", "qwen3_moe", "compressed-tensors", "experts lie in other tensors"),
}


@pytest.mark.parametrize(("recipe", "name", "to", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_hold_is_refused(recipe: Any, name: str, to: str, message: str, tmp_path: Path) -> None:
    source = saved(recipe, tmp_path / "ours", name, torch.float16 if recipe == "smoothquant-opt" else torch.float32)
    with pytest.raises(SaveError) as caught:
        api.export(source, to)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_bad_places_are_refused(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    CAUSAL["llama"].make().save_pretrained(tmp_path / "floats")  # type: ignore[operator]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    before = digests(source)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (SaveError, "compressed-tensors, gptq, awq", (source, "gguf")),
        (SaveError, "is not empty", (source, "gptq", tmp_path / "full")),
        (SaveError, "is not empty", (source, "gptq", source)),
        (SaveError, "is a file", (source, "gptq", source / "config.json")),
        (LoadError, "holds float weights: quantise them first", (tmp_path / "floats", "gptq")),
        (LoadError, "is gptq already", (ROOT / "gptq-4bit-g32", "awq")),
        (LoadError, "has no config.json", (tmp_path / "full", "gptq")),
        (LoadError, "no such file or folder", (tmp_path / "none", "gptq")),
        (LoadError, "is no folder of a saved patched model", ("smollm2-135m", "gptq")),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            api.export(*arguments)
    assert digests(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "full", "ours"]


def test_damage_leaves_nothing_behind(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadError, match="SHA-256 differs"):
        api.export(source, "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def _export_and_die(source: Path) -> None:
    stock = writing.Shard._write

    def kill(shard: Any, name: str, tensor: Any) -> None:
        stock(shard, name, tensor)
        if shard.path.parent.name.startswith(".ours-gptq") and "layers.1" in name:
            signal.raise_signal(signal.SIGKILL)

    writing.Shard._write = kill  # type: ignore[method-assign]
    api.export(source, "gptq")


def test_a_kill_leaves_the_source_and_the_next_export_goes_through(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    before = digests(source)
    child = get_context("fork").Process(target=_export_and_die, args=(source,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert digests(source) == before
    assert not (tmp_path / "ours-gptq").exists()
    made = api.export(source, "gptq")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "ours-gptq"]
    assert (made.folder / "model.safetensors").is_file()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    source = saved(SYMMETRIC, tmp_path / "ours")
    monkeypatch.setattr(writing.Shard, "_write", full)
    with pytest.raises(SaveError, match="free some space"):
        api.export(source, "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


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
