"""Parts of a patched model: what they refuse, and what copies of them are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from tests.support.packed import patch, plain, replacements
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, full_batch

some = pytest.mark.parametrize("form", ["exact", "int8"])
REFUSED: dict[str, Callable[[Any, Path], Any]] = {
    "resize": lambda model, folder: model.resize_token_embeddings(600),
    "save": lambda model, folder: model.save_pretrained(folder),
    "push": lambda model, folder: model.push_to_hub("somebody/something"),
}


@pytest.mark.parametrize("action", REFUSED)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])
def test_what_the_model_refuses_its_parts_refuse_too(name: str, action: str, tmp_path: Path) -> None:
    model = accelpatch.patch(CAUSAL[name].make(), "int8", verify=False)
    models = [part for part in model.modules() if hasattr(type(part), "resize_token_embeddings")]
    assert len(models) >= 2
    inside = models if action == "resize" else models[1:]  # the whole can be saved
    before = logits(model, full_batch())
    for part in inside:
        with pytest.raises(PatchError, match=r"accelpatch\.unpatch\(model\)"):
            REFUSED[action](part, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, full_batch()), before)
    accelpatch.unpatch(model)
    model.base_model.resize_token_embeddings(200)


def test_a_copy_of_a_part_is_the_plain_part() -> None:
    model = accelpatch.patch(plain("llama"), "int8", verify=False)
    for path in ("model", "model.layers.0", "model.layers.1.mlp", "lm_head", "model.embed_tokens"):
        part = model.get_submodule(path)
        alone = copy.deepcopy(part)
        assert replacements(alone) == []
        assert [name for name, _ in alone.named_modules()] == [name for name, _ in part.named_modules()]
    head = copy.deepcopy(model.lm_head)
    assert type(head) is nn.Linear
    assert torch.equal(head.weight, model.lm_head.weight)
    assert list(head.state_dict()) == ["weight"]
    ids = full_batch()["input_ids"]
    alone = copy.deepcopy(model.model)
    found, due = (one(input_ids=ids, use_cache=False).last_hidden_state for one in (alone, model.model))
    torch.testing.assert_close(found, due, rtol=1e-3, atol=1e-3)
    alone.layers[0].mlp.up_proj.weight.sum().backward()


@some
def test_a_copy_inside_a_wrapper_is_a_patched_model(form: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model = model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.model, name)

    wrapper = Wrapper(patch(plain("llama"), form))
    twin = copy.deepcopy(wrapper)
    assert type(twin) is Wrapper
    assert replacements(twin.model) == replacements(wrapper.model) != []
    accelpatch.unpatch(twin.model)
    assert replacements(twin) == []
    assert torch.equal(logits(twin.model, full_batch()), logits(plain("llama"), full_batch()))


@some
def test_another_model_of_a_patched_class_is_a_plain_one(form: str, tmp_path: Path) -> None:
    model = patch(plain("llama"), form)
    config = copy.deepcopy(model.config)
    for other in (type(model)(config), type(model.model)(config)):
        other.resize_token_embeddings(200)
        other.save_pretrained(tmp_path)
        other.train()
    again = type(model).from_pretrained(tmp_path)
    assert replacements(again) == []
    model.save_pretrained(tmp_path / "patched")
    assert replacements(accelpatch.load(str(tmp_path / "patched")).model) == replacements(model)


@some
def test_a_part_and_the_whole_are_not_patched_both(form: str) -> None:
    model = patch(plain("llama"), form)
    for part in (model.model, model.model.layers[0]):
        with pytest.raises(PatchError, match="belongs to one that is patched already"):
            patch(part, form)
    accelpatch.unpatch(model)
    patch(model.model, form)
    with pytest.raises(PatchError, match=r"a part of the model, model, is patched already"):
        patch(model, form)
    accelpatch.unpatch(model.model)
    assert replacements(model) == []
