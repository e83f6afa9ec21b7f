"""PEFT writes into the weights that it adapts: merges, and initialisations that take a part out of the weight."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.recipe.recipe import parse
from tests.support.lora import adapted, logits, off, peft
from tests.support.packed import PATCHES, packed, plain, rounded
from tests.support.steps import inner
from tests.support.tiny import CAUSAL

TARGETS = ("q_proj", "v_proj", "down_proj")
NAMES = {"llama": TARGETS, "phi3": ("qkv_proj", "down_proj"), "gpt2": ("c_attn", "c_fc"), "gemma3": TARGETS}
forms = pytest.mark.parametrize("form", PATCHES)
MERGES: dict[str, Any] = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "safe": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter": lambda model: model.merge_adapter() or model,
    "safe-adapter": lambda model: model.merge_adapter(safe_merge=True) or model,
}


def lora(model: Any, name: str, **changes: Any) -> Any:
    fan = {"fan_in_fan_out": name == "gpt2"}
    return adapted(model, target_modules=list(NAMES[name]), **fan, **changes)


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Path -> what a layer must hold once its adapter was merged, by a plain product of the adapter's matrices."""
    due = {}
    for path, layer in inner(model).named_modules():
        if hasattr(layer, "base_layer"):
            weight = layer.base_layer.weight.clone() + layer.get_delta_weight("default").detach()
            due[path] = rounded(layer.base_layer, weight)
    return due


def assert_merged(made: Any, stock: Any, form: str, rounds: int = 2) -> None:
    """The stock model's logits, up to `rounds` times what the format takes from a merged model's weights."""
    once = PATCHES[form](copy.deepcopy(inner(stock)))
    allowed = rounds * off(logits(once), logits(stock)) + 0.02
    assert off(logits(made), logits(stock)) < allowed


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("merge", MERGES)
@forms
def test_a_merge_takes_effect(form: str, merge: str, name: str) -> None:
    if form == "compact" and name == "gpt2":
        pytest.skip("Conv1D has no compact form and is not replaced")
    model = lora(packed(name, form), name)
    due = merged_weights(model)
    made = MERGES[merge](model)
    for path, weight in due.items():
        module = inner(made).get_submodule(path)
        module = getattr(module, "base_layer", module)
        torch.testing.assert_close(module.weight.float(), weight.float(), rtol=1e-2, atol=1e-3)
    assert_merged(made, lora(plain(name, form), name).merge_and_unload(), form)


@forms
def test_a_patch_after_the_adapter_then_merged(form: str) -> None:
    model = lora(plain("llama", form), "llama")
    PATCHES[form](inner(model))
    assert_merged(model.merge_and_unload(), lora(plain("llama", form), "llama").merge_and_unload(), form)


@forms
def test_unmerged_again(form: str) -> None:
    model = lora(packed("llama", form), "llama")
    model.merge_adapter()
    model.unmerge_adapter()
    assert_merged(model, lora(plain("llama", form), "llama").merge_and_unload(), form, rounds=3)
    with model.disable_adapter():
        assert_merged(model, plain("llama", form), form, rounds=3)


def test_merged_before_the_patch_and_unmerged_after_it() -> None:
    model, stock = lora(plain(), "llama"), lora(plain(), "llama")
    for one in (model, stock):
        one.merge_adapter()
    accelpatch.patch(model, "int8", verify=False)
    for one in (model, stock):
        one.unmerge_adapter()
    with model.disable_adapter(), stock.disable_adapter():
        assert off(logits(model), logits(stock)) < 0.05
    assert off(logits(model), logits(stock)) < 0.05


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "loftq"])
@pytest.mark.parametrize("form", ["int8", "fp8", "compact"])
def test_an_initialisation_that_takes_a_part_out_of_the_weight(form: str, start: str) -> None:
    """The adapter and what is left of the weight are together the weight."""
    options: dict[str, Any] = {"init_lora_weights": start}
    if start == "loftq":
        options["loftq_config"] = peft.LoftQConfig(loftq_bits=8)
        pytest.importorskip("scipy", reason="PEFT's LoftQ needs scipy")
        pytest.importorskip("bitsandbytes", reason="PEFT's LoftQ needs bitsandbytes, on a GPU")
    bare, model = packed("llama", form), packed("llama", form)
    alone = logits(bare)
    model = lora(model, "llama", lora_alpha=4, **options)
    assert off(logits(model), alone) < {"int8": 0.03, "compact": 0.05, "fp8": 0.1}[form]
    with model.disable_adapter():
        assert off(logits(model), alone) > 0.1, "nothing was taken out of the weight"


@pytest.mark.parametrize("form", ["int8", "compact"])
def test_adapters_that_are_no_plain_lora(form: str) -> None:
    for changes in ({"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}):
        model = CAUSAL["qwen2"].make(torch.bfloat16 if form == "compact" else torch.float32)
        model = adapted(PATCHES[form](model), target_modules=["q_proj", "v_proj"], **changes)
        before = logits(model)
        assert off(logits(model.merge_and_unload()), before) < 0.05, changes


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "VeraConfig", "OFTConfig", "IA3Config", "HRAConfig"])
def test_other_tuners(kind: str) -> None:
    more: dict[str, Any] = {"IA3Config": {"feedforward_modules": []}, "OFTConfig": {"oft_block_size": 8}}.get(kind, {})
    if kind in ("LoHaConfig", "LoKrConfig", "HRAConfig"):
        more = {"r": 4, "init_weights": False}
    if kind == "VeraConfig":
        more = {"r": 4, "d_initial": 1.0}
    made = []
    for patch in (False, True):
        torch.manual_seed(3)
        model = peft.get_peft_model(plain(), getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **more)).eval()
        torch.manual_seed(4)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                assert "q_proj" in key or not parameter.requires_grad or "v_proj" in key or "vera" in key
        if patch:
            accelpatch.patch(model, "int8", verify=False)
        made.append(model)
    stock, model = made
    assert off(logits(model), logits(stock)) < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, model = stock.merge_and_unload(), model.merge_and_unload()
    assert off(logits(model), logits(stock)) < 0.05


MIXED = parse(
    "name: mixed\nextends: int8\nrules:\n  - name: first\n    match: {name: 'model.layers.0.*'}\n    replace: keep\n"
)


def test_a_model_of_which_some_layers_are_packed_is_merged_as_a_whole() -> None:
    model, stock = lora(accelpatch.patch(plain(), MIXED, verify=False), "llama"), lora(plain(), "llama")
    kinds = {type(layer.self_attn.q_proj.base_layer).__name__ for layer in inner(model).model.layers}
    assert len(kinds) == 2
    assert off(logits(model.merge_and_unload()), logits(stock.merge_and_unload())) < 0.05


def test_a_merge_leaves_the_tie_of_the_configuration() -> None:
    """PEFT compares the addresses of the head's and the table's weights."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = lora(packed("llama"), "llama").merge_and_unload()
    assert [str(one.message) for one in said if "tied" in str(one.message)] == []
    assert model.config.tie_word_embeddings is True


def test_unpatch_after_a_merge_gives_the_merged_model() -> None:
    model = lora(packed("llama"), "llama").merge_and_unload()
    due, stock = logits(model), lora(plain(), "llama").merge_and_unload()
    with pytest.warns(UserWarning, match="written while they were packed"):
        accelpatch.unpatch(model)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    for key, value in stock.state_dict().items():
        if not any(target in key for target in TARGETS):
            assert torch.equal(value, model.state_dict()[key]), key
    assert off(logits(model), logits(stock)) < 0.05
    assert off(logits(model), due) < 0.05
