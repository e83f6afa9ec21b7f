"""What is done to a patched model on a GPU takes effect in its captured steps, and is there after `unpatch`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.fusion.fused_model import FUSED
from tests.support.lora import adapted, peft
from tests.support.packed import replacements
from tests.support.steps import logits as steps
from tests.support.steps import stock
from tests.support.tiny import CAUSAL, full_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}
RECIPES = ("exact", "compact", "int8", "int4")
recipes = pytest.mark.parametrize("recipe", RECIPES)
REACH = {"exact": 0.03, "compact": 0.03, "int8": 0.08, "int4": 0.7}


def plain(dtype: torch.dtype = torch.bfloat16) -> Any:
    return CAUSAL["llama"].make(dtype, **SIZES).cuda()


def patched(recipe: str, **options: Any) -> Any:
    return accelpatch.patch(plain(), recipe, verify=False, **options)


@torch.no_grad()
def out(model: Any) -> Tensor:
    found: Tensor = model(input_ids=full_batch()["input_ids"].cuda(), use_cache=False).logits.float()
    return found


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def assert_steps_like_the_modules(model: Any) -> Tensor:
    """A prompt and captured steps, beside transformers' own loop over the same modules."""
    found, due = steps(model, full_batch(), 8), steps(stock(model), full_batch(), 8)
    assert off(found, due) < 0.03
    return found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda layer: layer.mlp.down_proj.weight.data.mul_(-1.5),
    "part": lambda layer: layer.self_attn.q_proj.weight[:64].zero_(),
    "gate": lambda layer: layer.mlp.gate_proj.weight.copy_(layer.mlp.up_proj.weight * 2),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "hook": lambda layer: layer.mlp.act_fn.register_forward_hook(lambda module, args, out: out * 3),
    "scaling": lambda layer: setattr(layer.self_attn, "scaling", 0.02),
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@recipes
def test_a_change_is_in_the_next_step(recipe: str, change: str) -> None:
    model, other = patched(recipe), plain()
    before = assert_steps_like_the_modules(model)
    with torch.no_grad():
        for one in (model, other):
            for layer in one.model.layers:
                CHANGES[change](layer)
    after = assert_steps_like_the_modules(model)
    assert off(after, before) > 0.05, "the change changes nothing"
    assert off(out(model), out(other)) < REACH[recipe]
    accelpatch.unpatch(model)
    assert replacements(model) == []
    assert off(out(model), out(other)) < (1e-6 if recipe in ("exact", "compact") else REACH[recipe])


@recipes
def test_adapters_are_merged_and_unmerged(recipe: str) -> None:
    model, other = adapted(patched(recipe)), adapted(plain())
    due, alone = out(other), out(plain())
    assert off(due, alone) > 0.1
    assert_steps_like_the_modules(model)
    model.merge_adapter()
    assert_steps_like_the_modules(model)
    assert off(out(model), due) < REACH[recipe]
    model.unmerge_adapter()
    assert off(out(model), due) < REACH[recipe]
    model = model.merge_and_unload()
    assert_steps_like_the_modules(model)
    assert model.accelpatch.report().paths[FUSED] > 0
    accelpatch.unpatch(model)
    assert off(out(model), due) < REACH[recipe]


@recipes
def test_a_copy_that_peft_trains(recipe: str) -> None:
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    model = peft.get_peft_model(patched(recipe), options).eval()
    other = peft.get_peft_model(plain(), options).eval()
    head = model.base_model.model.lm_head
    assert {type(one).__name__ for one in head.modules_to_save.values()} == {"Linear"}
    assert off(out(model), out(other)) < REACH[recipe]
    assert_steps_like_the_modules(model)
    ids = full_batch()["input_ids"].cuda()
    accelpatch.unpatch(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert off(out(model), out(other)) < REACH[recipe]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@recipes
def test_autocast_gives_the_dtypes_of_the_stock_model(recipe: str, weights: torch.dtype, dtype: torch.dtype) -> None:
    model, other = accelpatch.patch(plain(weights), recipe, verify=False), plain(weights)
    ids = full_batch()["input_ids"].cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype):
        found, due = (one(input_ids=ids, use_cache=False, output_hidden_states=True) for one in (model, other))
    assert found.logits.dtype == due.logits.dtype
    assert [h.dtype for h in found.hidden_states] == [h.dtype for h in due.hidden_states]
    assert off(found.logits.float(), due.logits.float()) < REACH[recipe]


@recipes
def test_a_state_that_was_loaded(recipe: str) -> None:
    model, other = patched(recipe), plain()
    assert_steps_like_the_modules(model)
    for parameter in other.parameters():
        parameter.data *= 0.5
    model.load_state_dict(other.state_dict())
    assert_steps_like_the_modules(model)
    assert off(out(model), out(other)) < REACH[recipe]
    accelpatch.unpatch(model)
    assert off(out(model), out(other)) < (1e-6 if recipe in ("exact", "compact") else REACH[recipe])


@recipes
def test_weights_that_accelerate_offloads_after_the_patch(recipe: str) -> None:
    model = patched(recipe)
    due = out(stock(model))  # by the modules: accelerate's hooks leave no other way
    cpu_offload(model, execution_device=torch.device("cuda", 0))
    assert off(out(model), due) < 1e-3
    with pytest.raises(PatchError, match="remove_hook_from_module"):
        accelpatch.unpatch(model)
    remove_hook_from_module(model, recurse=True)
    accelpatch.unpatch(model)
    assert torch.equal(out(model.cuda()), out(plain()))


@recipes
def test_moves_casts_and_copies(recipe: str) -> None:
    model, other = patched(recipe), plain()
    assert_steps_like_the_modules(model)
    twin = copy.deepcopy(model)
    for one in (model, other):
        one.half().bfloat16()
    assert_steps_like_the_modules(model)
    model.cpu().cuda()
    accelpatch.unpatch(model)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    accelpatch.unpatch(twin)
    assert torch.equal(out(twin), out(plain()))
