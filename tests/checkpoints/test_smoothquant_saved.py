"""Saved SmoothQuant models: smoothed once, with their static scales; and how a float checkpoint becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import accelpatch
from accelpatch import api
from accelpatch.errors import LoadError, PatchError
from accelpatch.hf import AccelpatchConfig
from accelpatch.modules.quantized_linear import W8A8Linear
from tests.support.checkpoints import logits, opened, weights
from tests.support.packed import replacements
from tests.support.smoothing import calibrated
from tests.support.tiny import CAUSAL

RECIPES = pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant-static"])
FAMILIES = ("llama", "gemma3", "gpt2", "bloom", "opt", "phi3", "cohere", "qwen3_moe", "gpt_neox")


def saved(name: str, recipe: Any, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = CAUSAL[name].make(dtype, **changes)
    accelpatch.patch(model, recipe, statistics=calibrated(model))
    model.save_pretrained(folder)
    return model


@pytest.mark.each_value
@RECIPES
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_comes_back(name: str, recipe: str, tmp_path: Path) -> None:
    model = saved(name, recipe, tmp_path / "patched")
    due = logits(model)
    for loaded in (opened(tmp_path / "patched"), accelpatch.load(str(tmp_path / "patched")).model):
        assert replacements(loaded) == replacements(model)
        assert torch.equal(logits(loaded), due)
        assert not any("wrote itself" in note for note in loaded.accelpatch.report().notes)
        for path, module in model.named_modules():
            if isinstance(module, W8A8Linear):
                one, other = (one.canonical().input_scale for one in (module, loaded.get_submodule(path)))
                assert (one is None) == (other is None), path
                assert one is None or one.equal(other), path
    loaded.save_pretrained(tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "patched")


def test_static_scales_are_in_the_files(tmp_path: Path) -> None:
    model = saved("llama", "smoothquant-static", tmp_path)
    held = {
        f"{path}.input_scale"
        for path, module in model.named_modules()
        if isinstance(module, W8A8Linear) and module.canonical().input_scale is not None
    }
    files = load_file(tmp_path / "model.safetensors")
    assert held
    assert {name for name in files if name.endswith("input_scale")} == held
    assert not any(name.endswith((".factors", ".divisors")) for name in files)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_norms_are_divided_once(name: str, tmp_path: Path) -> None:
    model, plain = saved(name, "smoothquant", tmp_path), CAUSAL[name].make()
    loaded = opened(tmp_path)
    for path, module in plain.named_modules():
        if path.endswith("input_layernorm"):
            smoothed, after = model.get_submodule(path).weight, loaded.get_submodule(path).weight
            assert not torch.allclose(smoothed, module.weight)
            assert torch.equal(after, smoothed)


@RECIPES
@pytest.mark.parametrize("name", ["gemma", "llama", "opt"])
def test_bfloat16(name: str, recipe: str, tmp_path: Path) -> None:
    CAUSAL[name].make().save_pretrained(tmp_path / "floats")  # `to` would round the rotary frequencies too
    model = opened(tmp_path / "floats", dtype=torch.bfloat16)
    accelpatch.patch(model, recipe, statistics=calibrated(model))
    model.save_pretrained(tmp_path / "patched")
    loaded = opened(tmp_path / "patched", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))


def test_a_group_that_stayed_float_comes_back_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.patching import stages

    real = stages.over_bound
    monkeypatch.setattr(stages, "over_bound", lambda errors, recipe, entry: (
        "by decree" if entry.site.path == "model.layers.0.self_attn.k_proj" else real(errors, recipe, entry)
    ))  # fmt: skip
    model = saved("llama", "smoothquant", tmp_path)
    monkeypatch.undo()
    loaded = opened(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    quantised = [path for path, module in loaded.named_modules() if isinstance(module, W8A8Linear)]
    assert quantised == [path for path, module in model.named_modules() if isinstance(module, W8A8Linear)]
    assert not any(path.startswith("model.layers.0.self_attn") for path in quantised)


@RECIPES
def test_a_float_checkpoint_is_patched_as_it_loads(recipe: str, tmp_path: Path) -> None:
    model: Any = CAUSAL["llama"].make()
    model.save_pretrained(tmp_path / "floats")
    statistics = calibrated(model)
    loaded = accelpatch.load(str(tmp_path / "floats"), recipe, statistics=statistics).model
    accelpatch.patch(model, recipe, statistics=statistics)
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(PatchError, match="there never were originals"):
        accelpatch.unpatch(loaded)


@RECIPES
def test_from_pretrained_refuses_to_calibrate(recipe: str, tmp_path: Path) -> None:
    CAUSAL["llama"].make().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"this recipe calibrates.*accelpatch quantize"):
        opened(tmp_path, quantization_config=AccelpatchConfig(recipe))


def test_quantize_writes_what_patch_and_save_write(tmp_path: Path) -> None:
    model: Any = CAUSAL["llama"].make()
    model.save_pretrained(tmp_path / "floats")
    statistics = calibrated(model)
    api.quantize(str(tmp_path / "floats"), "smoothquant-static", tmp_path / "out", statistics=statistics)
    saved("llama", "smoothquant-static", tmp_path / "patched")
    assert weights(tmp_path / "out") == weights(tmp_path / "patched")


BAD = {
    "nan": torch.tensor([float("nan")]), "zero": torch.tensor([0.0]), "negative": torch.tensor([-1.0]),
    "infinite": torch.tensor([float("inf")]), "two": torch.tensor([1.0, 2.0]), "empty": torch.empty(0),
    "float64": torch.tensor([1.0], dtype=torch.float64), "no-dimension": torch.tensor(1.0),
}  # fmt: skip


@pytest.mark.parametrize("scale", [pytest.param(scale, id=name) for name, scale in BAD.items()])
def test_static_scales_that_cannot_be(scale: torch.Tensor, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from tests.support.checkpoints import header

    saved("llama", "smoothquant-static", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, facts = load_file(file), header(file)[0]["__metadata__"]
    name = next(one for one in tensors if one.endswith("input_scale"))
    save_file(tensors | {name: scale}, file, metadata=facts)
    with pytest.raises(LoadError, match="input_scale"):
        opened(tmp_path)
