"""accelpatch.merge: adapters into the float originals of a patched model, or into its rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch import api
from accelpatch.errors import LoadError, PatchError, SaveError
from tests.support.lora import adapted, logits, off, peft
from tests.support.packed import plain
from tests.support.steps import inner
from tests.support.tiny import CAUSAL

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(model: Any, **changes: Any) -> Any:
    return adapted(model, target_modules=TARGETS, **changes)


def merged_floats() -> Any:
    return lora(plain()).merge_and_unload()


@pytest.mark.parametrize("order", ["patched first", "adapted first"])
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_a_merge_into_the_originals_rounds_once(recipe: str, order: str) -> None:
    """It is, bit for bit, the merged float model, patched; and unpatched it is the merged float model."""
    due = accelpatch.patch(merged_floats(), recipe, verify=False)
    if order == "patched first":
        model = lora(accelpatch.patch(plain(), recipe, verify=False))
    else:
        model = accelpatch.patch(lora(plain()), recipe, verify=False)
    own = inner(model)
    made = accelpatch.merge(model, verify=False)
    assert made is own
    assert made.accelpatch.plan.recipe.name == recipe
    assert not [name for name, _ in made.named_parameters() if "lora" in name]
    assert torch.equal(logits(made), logits(due))
    accelpatch.unpatch(made)
    stock = merged_floats().state_dict()
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, stock[name], rtol=0, atol=1e-6)


def test_a_merge_into_rounded_weights_is_further_off() -> None:
    stock = logits(merged_floats())
    once = accelpatch.merge(lora(accelpatch.patch(plain(), "int4", verify=False)), verify=False)
    twice = accelpatch.merge(lora(accelpatch.patch(plain(), "int4", verify=False)), rounded=True)
    assert twice.accelpatch.plan.recipe.name == "int4"
    assert off(logits(once), stock) < off(logits(twice), stock) < 1.0


def test_without_originals_it_is_refused_before_anything_changes() -> None:
    model = lora(accelpatch.patch(plain(), "int8", verify=False, keep_original="none"))
    before = logits(model)
    with pytest.raises(PatchError, match=r"the float originals.*are gone.*merge\(model, rounded=True\)"):
        accelpatch.merge(model)
    assert torch.equal(logits(model), before)
    assert off(logits(accelpatch.merge(model, rounded=True)), before) < 0.05


def test_a_model_that_is_not_patched() -> None:
    made = accelpatch.merge(lora(plain()))
    assert not hasattr(made, "accelpatch")
    assert torch.equal(logits(made), logits(merged_floats()))


def test_a_chosen_adapter_alone() -> None:
    model = lora(accelpatch.patch(plain(), "int8", verify=False))
    torch.manual_seed(5)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
    model.set_adapter("other")
    due = logits(model)
    model.set_adapter("default")
    with pytest.raises(PatchError, match="no adapter is called 'second'; there are default, other"):
        accelpatch.merge(model, adapters=["second"])
    assert off(logits(accelpatch.merge(model, adapters=["other"], verify=False)), due) < 0.05


def test_an_adapter_that_is_not_finite_is_refused() -> None:
    model = lora(accelpatch.patch(plain(), "int8", verify=False))
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if "lora_A" in name).fill_(float("inf"))
    with pytest.raises(PatchError, match=r"lora_A.* holds NaN or infinity"):
        accelpatch.merge(model)
    assert inner(model).accelpatch.report().recipe == "int8"


def test_what_has_no_adapters() -> None:
    with pytest.raises(PatchError, match="has no adapters"):
        accelpatch.merge(accelpatch.patch(plain(), "int8", verify=False))


def folder_of(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_adapters_of_folders_are_attached_and_switched(tmp_path: Path) -> None:
    one, other = lora(plain()), lora(plain(), seed=9)
    folders = [folder_of(one, tmp_path / "a" / "v1.0"), folder_of(other, tmp_path / "b" / "v1.0")]
    model, names = api.attach(accelpatch.patch(plain(), "exact", verify=False), folders)
    assert names == ["v1_0", "v1_0-2"]
    for name, due in zip(names, (one, other), strict=True):
        model.set_adapter(name)
        assert off(logits(model), logits(due)) < 1e-4


def test_folders_that_hold_no_adapter_or_another_models(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="holds no adapter"):
        api.attach(plain(), [tmp_path / "empty"])
    (tmp_path / "run" / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(LoadError, match="checkpoint-4 is a checkpoint of a run that was stopped"):
        api.attach(plain(), [tmp_path / "run"])
    wide = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    others = {"wide": adapted(wide, target_modules=TARGETS), "gpt2": adapted(plain("gpt2"), target_modules=["c_attn"])}
    for name, other in others.items():
        folder = folder_of(other, tmp_path / name)
        with pytest.raises(LoadError, match="the adapter does not fit this model"):
            api.attach(plain(), [folder])
    pickled = folder_of(lora(plain()), tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(LoadError, match="holds no adapter"):
        api.attach(plain(), [pickled])


@pytest.mark.parametrize("recipe", [None, "int8"])
def test_files(recipe: str | None, tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path / "base")
    folder = folder_of(lora(plain()), tmp_path / "adapter")
    api.merge_files(str(tmp_path / "base"), [folder], tmp_path / "out", recipe)
    loaded = accelpatch.load(str(tmp_path / "out")).model
    assert hasattr(loaded, "accelpatch") == (recipe is not None)
    assert off(logits(loaded), logits(merged_floats())) < (1e-5 if recipe is None else 0.05)
    with pytest.raises(SaveError, match="is not empty"):
        api.merge_files(str(tmp_path / "base"), [folder], tmp_path / "out", recipe)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_adapters_of_packed_experts_go_into_the_originals(recipe: str) -> None:
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}

    def made() -> Any:
        return CAUSAL["mixtral"].make()

    due = accelpatch.patch(adapted(made(), **targets).merge_and_unload(), recipe, verify=False)
    merged = accelpatch.merge(adapted(accelpatch.patch(made(), recipe, verify=False), **targets), verify=False)
    assert torch.equal(logits(merged), logits(due))
