"""Damaged, foreign and hostile folders: an error with the file and the tensor, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.checkpoints.inspection import inspect
from accelpatch.checkpoints.writing import Shards
from accelpatch.errors import AccelpatchError, LoadError, SaveError
from tests.support.checkpoints import config_of, digests, header, logits, opened, rewritten, saved

WEIGHTS = "model.safetensors"
SITE = "model.layers.0.mlp.down_proj"


def _refused(folder: Path) -> str:
    """What both ways to load a folder say."""
    said = []
    for load in (opened, lambda folder: accelpatch.load(str(folder))):
        with pytest.raises(LoadError) as error:
            load(folder)
        said.append(str(error.value))
    return "\n".join(said)


def _each_names(folder: Path, *words: str) -> None:
    for said in _refused(folder).split("\n"):
        for word in words:
            assert word in said


@pytest.mark.parametrize("part", ["q", "scale", "offset"])
def test_a_flipped_bit_names_the_tensor(folder: Path, part: str) -> None:
    _flip(folder, f"{SITE}.{part}")
    _each_names(folder, WEIGHTS, f"{SITE}.{part}", "fetch")


def test_a_flipped_bit_of_a_float_tensor(folder: Path) -> None:
    _flip(folder, "model.norm.weight")
    _each_names(folder, WEIGHTS, "model.norm.weight", "fetch")


def _flip(folder: Path, name: str) -> None:
    facts, start = header(folder / WEIGHTS)
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[start + facts[name]["data_offsets"][0] + 3] ^= 16
    (folder / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000, -1], ids=lambda size: f"{size} bytes")
def test_truncated(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])
    _each_names(folder, WEIGHTS, "truncated or damaged")


def test_something_at_the_end(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    _each_names(folder, WEIGHTS, "truncated or damaged")


Change = Callable[[dict[str, Any], dict[str, Any]], None]  # of a header, and of accelpatch's facts in it


def _shape(name: str, shape: list[int]) -> Change:
    return lambda head, facts: head[name].update(shape=shape)


HEADERS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "another version": (lambda head, facts: facts.update(version=2), ("version 2", "upgrade")),
    "a version that is text": (lambda head, facts: facts.update(version="1"), ("version '1'",)),
    "no version": (lambda head, facts: facts.pop("version"), ("not written by accelpatch",)),
    "no sites": (lambda head, facts: facts.pop("sites"), ("sites is damaged",)),
    "sites of lists": (lambda head, facts: facts.update(sites={SITE: []}), ("sites is damaged",)),
    "a hash that is missing": (lambda head, facts: facts["sha256"].pop(f"{SITE}.q"), (f"{SITE}.q",)),
    "a hash too many": (lambda head, facts: facts["sha256"].update(more="0"), ("more",)),
    "a site that is not there": (
        lambda head, facts: facts["sites"].update({"model.layers.9": "int4_weight_only"}), ("model.layers.9",)
    ),
    "another replacer": (lambda head, facts: facts["sites"].update({SITE: "int8_weight_only"}), (SITE,)),
    "no such replacer": (lambda head, facts: facts["sites"].update({SITE: "os.system"}), (SITE,)),
    "a site that was left out": (lambda head, facts: facts["sites"].pop(SITE), (SITE,)),
    "another shape of q": (_shape(f"{SITE}.q", [48, 64]), (SITE, "belongs here")),
    "another shape of scale": (_shape(f"{SITE}.scale", [3, 64]), (SITE, "belongs here")),
    "a shape of many dimensions": (_shape(f"{SITE}.q", [1, 64, 48]), (SITE, "belongs here")),
    "sizes that overflow": (_shape(f"{SITE}.q", [2**33, 2**33]), ("truncated or damaged",)),
    "a size over 64 bits": (_shape(f"{SITE}.q", [2**70, 1]), ("truncated or damaged",)),
    "another dtype of scale": (
        lambda head, facts: head[f"{SITE}.scale"].update(dtype="I16"),
        (f"{SITE}.scale", "int16"),
    ),
    "another shape of a norm": (_shape("model.norm.weight", [8, 8]), ("model.norm.weight",)),
    "overlapping tensors": (
        lambda head, facts: head[f"{SITE}.q"].update(data_offsets=head["model.norm.weight"]["data_offsets"]),
        ("truncated or damaged",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [pytest.param(*case, id=name) for name, case in HEADERS.items()])
def test_headers(folder: Path, change: Change, words: tuple[str, ...]) -> None:
    head, _ = header(folder / WEIGHTS)
    facts = json.loads(head["__metadata__"]["accelpatch"])
    change(head, facts)
    head["__metadata__"]["accelpatch"] = json.dumps(facts)
    rewritten(folder / WEIGHTS, head)
    _each_names(folder, *words)


def _with(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the weights of a folder again, changed, with hashes that are right."""
    from safetensors.torch import load_file

    head, _ = header(folder / WEIGHTS)
    sites = json.loads(head["__metadata__"]["accelpatch"])["sites"]
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    with Shards(folder, [*tensors], 1 << 30) as shards:
        for name, tensor in tensors.items():
            path = name.rpartition(".")[0]
            shards.add({name: tensor}, (path, sites[path]) if path in sites else None)
        shards.finish()


VALUES = {"NaN": float("nan"), "infinity": float("inf"), "minus infinity": -float("inf")}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in VALUES.items()])
@pytest.mark.parametrize("part", ["scale", "offset"])
def test_values_that_no_scale_has(folder: Path, part: str, value: float) -> None:
    _with(folder, lambda tensors: tensors[f"{SITE}.{part}"][3].fill_(value))
    _each_names(folder, SITE, f"{part}[3, 0]", "again")


@pytest.mark.parametrize("part", ["scale", "offset"])
def test_a_single_number_in_place_of_scales(folder: Path, part: str) -> None:
    _with(folder, lambda tensors: tensors.update({f"{SITE}.{part}": torch.tensor(1.0).half()}))
    _each_names(folder, WEIGHTS, SITE, f"{part} is torch.float16 []")


def test_a_scale_of_an_input_that_none_has(folder: Path) -> None:
    _with(folder, lambda tensors: tensors.update({f"{SITE}.input_scale": torch.ones(1)}))
    _each_names(folder, WEIGHTS, f"{SITE}.input_scale does not belong")


def test_a_scale_of_zero(model: Any, tmp_path: Path) -> None:
    saved(model, "int8", tmp_path / "patched")
    _with(tmp_path / "patched", lambda tensors: tensors[f"{SITE}.scale"][3].zero_())
    _each_names(tmp_path / "patched", SITE, "scale", "zero")


@pytest.mark.parametrize("name", [f"{SITE}.q", f"{SITE}.scale", f"{SITE}.offset", "model.norm.weight"])
def test_a_tensor_that_is_missing(folder: Path, name: str) -> None:
    _with(folder, lambda tensors: tensors.pop(name))
    _each_names(folder, WEIGHTS, name.removesuffix(".offset"))


def test_a_tensor_that_belongs_nowhere(folder: Path) -> None:
    _with(folder, lambda tensors: tensors.update({"model.more.weight": torch.ones(4)}))
    _each_names(folder, WEIGHTS, "model.more.weight")


def test_another_version_in_the_config(folder: Path) -> None:
    config = config_of(folder)
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    _each_names(folder, "version 2", "upgrade")


@pytest.mark.parametrize("recipe", [None, "", 3, "name: a\nrules: 3\n", "no_such_recipe", "/etc/passwd"], ids=repr)
def test_recipes_in_the_config(folder: Path, recipe: Any) -> None:
    config = config_of(folder)
    config["quantization_config"]["recipe"] = recipe
    (folder / "config.json").write_text(json.dumps(config))
    for load in (opened, lambda folder: accelpatch.load(str(folder))):
        with pytest.raises(AccelpatchError, match="recipe"):
            load(folder)


def test_float_weights_under_a_patched_config(folder: Path, floats: Path) -> None:
    shutil.copy(floats / WEIGHTS, folder / WEIGHTS)
    _each_names(folder, WEIGHTS, "not written by accelpatch")


def test_an_index_that_names_what_is_not_there(model: Any, tmp_path: Path) -> None:
    saved(model, "int4", folder := tmp_path / "patched", max_shard_size="20KB")
    lost = sorted(folder.glob("model-*"))[1]
    lost.unlink()
    for load in (lambda folder: accelpatch.load(str(folder)), inspect):
        with pytest.raises(LoadError, match=lost.name):
            load(folder)
    with pytest.raises((OSError, LoadError), match=lost.name):  # transformers' own error
        opened(folder)


def test_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    for load in (lambda folder: accelpatch.load(str(folder)), inspect):
        with pytest.raises(LoadError, match="run code"):
            load(folder)
    with pytest.raises(LoadError, match="run code"):
        inspect(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin"):
        opened(folder)


def test_quantising_into_its_own_folder(floats: Path) -> None:
    before = digests(floats)
    floats.with_name("link").symlink_to(floats)
    for out in (floats, floats.parent / "x" / ".." / "floats", floats.with_name("link")):
        with pytest.raises(SaveError, match="name another folder"):
            accelpatch.api.quantize(str(floats), "int4", out)
    assert digests(floats) == before


def test_a_folder_that_is_patched_is_not_quantised_again(folder: Path) -> None:
    with pytest.raises(LoadError, match="is a saved patched model"):
        accelpatch.api.quantize(str(folder), "int8", folder.with_name("out"))
    with pytest.raises(LoadError, match="is a saved patched model"):
        accelpatch.load(str(folder), "int8")
    assert not folder.with_name("out").exists()


def test_a_file_where_the_folder_should_be(model: Any, floats: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SaveError, match="is a file"):
        saved(model, "int4", tmp_path / "out")
    with pytest.raises(SaveError, match="is a file"):
        accelpatch.api.quantize(str(floats), "int4", tmp_path / "out")
    with pytest.raises(SaveError, match="out"):
        model.save_pretrained(tmp_path / "out" / "inside")
    with pytest.raises(SaveError, match="out"):
        accelpatch.api.quantize(str(floats), "int4", tmp_path / "out" / "inside")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(model: Any, floats: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(SaveError, match="name another folder"):
        saved(model, "int4", tmp_path / "closed" / "out")
    with pytest.raises(SaveError, match="name another folder"):
        accelpatch.api.quantize(str(floats), "int4", tmp_path / "closed" / "out")


def test_what_is_not_damaged_loads(folder: Path, model: Any) -> None:
    _with(folder, lambda tensors: None)
    assert torch.equal(logits(opened(folder)), logits(model))
