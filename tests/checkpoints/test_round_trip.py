"""What is saved comes back bit for bit, by transformers, by accelpatch, and quantised while it loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.hf import AccelpatchConfig
from accelpatch.recipe.recipe import parse
from tests.support.checkpoints import logits, opened, saved, weights
from tests.support.packed import packed, plain, replacements
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, Tiny


@pytest.mark.each_value
@spread("tiny, recipe", CAUSAL, ["int8", "int4", "exact"])
def test_every_family(tiny: Tiny, recipe: str, tmp_path: Path) -> None:
    model: Any = tiny.make()
    model.save_pretrained(tmp_path / "floats")
    due = logits(saved(model, recipe, tmp_path / "patched"))
    loaded = [opened(tmp_path / "patched"), accelpatch.load(str(tmp_path / "patched")).model]
    loaded.append(opened(tmp_path / "floats", quantization_config=AccelpatchConfig(recipe)))
    for one in loaded:
        assert replacements(one) == replacements(model)
        assert torch.equal(logits(one), due)
    loaded[0].save_pretrained(tmp_path / "again")
    loaded[2].save_pretrained(tmp_path / "at once")
    assert weights(tmp_path / "patched") == weights(tmp_path / "again") == weights(tmp_path / "at once")


def _bfloat16(folder: Path) -> Any:
    plain("llama").save_pretrained(folder.with_name("floats"))  # `to` would round the rotary frequencies too
    return saved(opened(folder.with_name("floats"), dtype=torch.bfloat16), "int4", folder)


def _of_fp8(folder: Path) -> Any:
    model = packed("llama", "fp8")
    model.save_pretrained(folder)
    return model


def _copied(folder: Path) -> Any:
    model = copy.deepcopy(accelpatch.patch(plain("llama"), "int4"))
    model.save_pretrained(folder)
    return model


KINDS = {"bfloat16": _bfloat16, "fp8": _of_fp8, "copy": _copied}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in KINDS.items()])
def test_other_models(make: Any, tmp_path: Path) -> None:
    model = make(tmp_path / "patched")
    loaded = opened(tmp_path / "patched", dtype="auto")
    assert loaded.dtype == model.dtype
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "patched")


def test_compact_weights_are_saved_as_they_were(tmp_path: Path) -> None:
    """Laid out for a GPU, and loaded on a CPU: nothing in the files depends on the device."""
    model = plain("llama", "compact", tie_word_embeddings=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelpatch.patch(model, "compact", verify=False, device=KNOWN["sm_90"])
    model.save_pretrained(tmp_path / "patched")
    after = opened(tmp_path / "patched", dtype="auto").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_site_over_its_bound_stays_float(tmp_path: Path) -> None:
    strict = parse("name: strict\nextends: int4\nverify: {bound: 0.05}\n")
    model = plain("llama")
    model.save_pretrained(tmp_path / "floats")
    saved(model, strict, tmp_path / "patched")
    kept = [site for site in model.accelpatch.report().sites if site.replacer is None]
    assert 0 < len(kept) < len(model.accelpatch.report().sites)
    loaded = opened(tmp_path / "patched")
    at_once = opened(tmp_path / "floats", quantization_config=AccelpatchConfig(strict))
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(at_once), logits(model))
    assert replacements(loaded) == replacements(model) == replacements(at_once)
