"""What a saved folder holds, what stays in it, and what `save_pretrained` leaves out and refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open

import accelpatch
from accelpatch.errors import PatchError, SaveError
from accelpatch.recipe.recipe import load
from tests.support.checkpoints import config_of, digests, logits, opened, saved, weights
from tests.support.packed import packed, plain, replacements

OWN = {"config.json", "generation_config.json", "recipe.yaml"}


def test_the_files(folder: Path) -> None:
    assert digests(folder).keys() == OWN | {"model.safetensors"}
    assert config_of(folder)["quantization_config"].keys() == {"quant_method", "version", "recipe", "verified"}
    assert load(folder / "recipe.yaml") == load("int4")
    assert [path.name for path in folder.parent.iterdir()] == ["patched"]
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 | 0o055


def test_tied_weights_are_stored_once(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert len({"model.embed_tokens.q", "lm_head.q"} & names) == 1
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & names
    loaded = opened(folder)
    assert loaded.lm_head.weight_owner is loaded.model.embed_tokens.weight_owner


def test_shards(model: Any, tmp_path: Path) -> None:
    saved(model, "int4", tmp_path / "patched", max_shard_size="20KB")
    shards = weights(tmp_path / "patched")
    assert len(shards) > 3
    assert torch.equal(logits(opened(tmp_path / "patched")), logits(model))
    model.save_pretrained(tmp_path / "patched")
    assert weights(tmp_path / "patched").keys() == {"model.safetensors"}
    assert torch.equal(logits(accelpatch.load(str(tmp_path / "patched")).model), logits(model))


@pytest.mark.parametrize("size", ["", "5", "0GB", "-1GB", 0, "5 TB", "GB", 1.5, None], ids=repr)
def test_sizes_that_cannot_be(size: Any, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="max_shard_size"):
        packed().save_pretrained(tmp_path / "patched", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def test_other_files_stay(folder: Path, model: Any) -> None:
    (folder / "README.md").write_text("mine")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "link").symlink_to("README.md")
    (folder / "model.md").write_text("mine")  # no weights, whatever its name begins with
    for old in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (folder / old).write_text("old")
    model.save_pretrained(folder)
    assert digests(folder).keys() == OWN | {"model.safetensors", "model.md", "README.md", "tokenizer.json", "link"}
    assert (folder / "link").is_symlink()
    assert (folder / "original" / "params.json").read_text() == "{}"


def test_float_weights_are_not_destroyed(floats: Path, model: Any) -> None:
    """Rounded ones cannot bring them back. Those of a recipe that rounds nothing are the same weights."""
    before = digests(floats)
    accelpatch.patch(model, "int4")
    with pytest.raises(SaveError, match="holds float weights"):
        model.save_pretrained(floats)
    assert digests(floats) == before
    accelpatch.patch(accelpatch.unpatch(model), "exact").save_pretrained(floats)
    assert "recipe.yaml" in digests(floats)


def test_through_a_link(folder: Path, model: Any) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    before = weights(folder)
    (folder / "recipe.yaml").unlink()
    model.save_pretrained(link)
    assert link.is_symlink()
    assert weights(folder) == before
    assert (folder / "recipe.yaml").is_file()


def test_the_live_model_has_no_trace(model: Any, tmp_path: Path) -> None:
    before, sampling = model.config.to_dict(), model.generation_config.to_dict()
    saved(model, "int4", tmp_path / "patched")
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (before, sampling)
    for loaded in (model, opened(tmp_path / "patched")):
        assert not hasattr(loaded.config, "quantization_config")
        assert not getattr(loaded, "is_quantized", False)
        assert not getattr(loaded, "hf_quantizer", None)


def test_the_generation_config_comes_back(model: Any, tmp_path: Path) -> None:
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 7, 1.5
    found = opened(saved(model, "int8", tmp_path / "patched") and tmp_path / "patched").generation_config
    assert (found.max_new_tokens, found.repetition_penalty) == (7, 1.5)


def test_after_unpatch_it_is_plain(model: Any, floats: Path, tmp_path: Path) -> None:
    saved(model, "int4", tmp_path / "patched")
    accelpatch.unpatch(model).save_pretrained(tmp_path / "plain")
    assert digests(tmp_path / "plain") == digests(floats)
    model.save_pretrained(tmp_path / "patched")  # over the patched one: the recipe is all that is left of it
    assert weights(tmp_path / "patched") == weights(floats)
    assert replacements(opened(tmp_path / "patched")) == []


def test_a_loaded_model_cannot_be_unpatched_and_says_so(folder: Path) -> None:
    with pytest.raises(PatchError, match="there never were originals here"):
        accelpatch.unpatch(opened(folder))


def test_one_that_is_quantised_while_it_loads_says_so_too(floats: Path) -> None:
    for recipe in ("int8", "smoothquant"):  # the second calibrates, and so loads the whole model first
        loaded = accelpatch.load(str(floats), recipe).model
        with pytest.raises(PatchError, match=r"load the float checkpoint without a recipe"):
            accelpatch.unpatch(loaded)


def test_a_copy_saves_itself(model: Any, tmp_path: Path) -> None:
    accelpatch.patch(model, "int8")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.fill_(2.0)
    copied.save_pretrained(tmp_path / "copy")
    loaded = opened(tmp_path / "copy")
    assert torch.equal(logits(loaded), logits(copied))
    assert not torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, "cpu"], ids=str)
def test_device_maps(folder: Path, model: Any, device_map: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU's own rounding differs")
    assert torch.equal(logits(opened(folder, device_map=device_map)), logits(model))


@pytest.mark.parametrize("options", [{"state_dict": {}}, {"variant": "fp16"}], ids=lambda options: next(iter(options)))
def test_what_a_patched_model_does_not_save(options: Any, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="leave out"):
        packed().save_pretrained(tmp_path / "patched", **options)
    assert list(tmp_path.iterdir()) == []


def _paths(operations: Any) -> set[str]:
    return {one.path_in_repo for one in operations}


def test_push_to_hub_uploads_the_files(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[set[str]] = []
    api, card = huggingface_hub.HfApi, huggingface_hub.ModelCard("no card")
    url = huggingface_hub.RepoUrl("https://huggingface.co/a/b")
    monkeypatch.setattr(api, "create_repo", lambda *_, **__: url)
    monkeypatch.setattr(api, "create_commit", lambda *_, operations, **__: sent.append(_paths(operations)))
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: card)
    accelpatch.patch(model, "int4").push_to_hub("a/b")
    assert sent == [OWN | {"model.safetensors", "README.md"}]


def test_adapters(model: Any, tmp_path: Path) -> None:
    """PEFT saves its own weights alone; the model in it refuses to write some of its tensors as an adapter's."""
    from tests.support.lora import adapted

    wrapped = adapted(accelpatch.patch(model, "int8", verify=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "config.json").exists()
    with pytest.raises(SaveError, match="is an adapter"):
        model.save_pretrained(tmp_path / "patched")
    assert not (tmp_path / "patched").exists()


def test_exec_saves_the_original(floats: Path, tmp_path: Path) -> None:
    """A script that knows nothing of the patch, run by `accelpatch exec`."""
    script = plain("llama")
    with accelpatch.patch_on_first_use("int4", verify=False, on_left=lambda model, why: None):
        logits(script)
        assert replacements(script)
        script.save_pretrained(tmp_path / "saved")
    assert weights(tmp_path / "saved") == weights(floats)
