"""PEFT's wrappers around whole modules (`modules_to_save`, trainable tokens), before and after a patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from tests.support.lora import logits, off, peft
from tests.support.packed import FORMS, patch, plain
from tests.support.steps import inner
from tests.support.tiny import CAUSAL, full_batch

forms = pytest.mark.parametrize("form", FORMS)


def wrapped(model: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**options | changes)).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_((0.2 * torch.randn(parameter.shape)).to(parameter.dtype))
    return model


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}


def wrappers(model: Any) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__ == "ModulesToSaveWrapper"]


REACH = {"exact": 1e-4, "int8": 0.03, "int4": 0.6, "fp8": 0.2, "compact": 0.03}
# what PEFT trains a copy of -> the class of the copy
SAVED = {"norm": "LlamaRMSNorm", "lm_head": "Linear", "embed_tokens": "Embedding", "mlp": "LlamaMLP",
         "self_attn": "LlamaAttention", "input_layernorm": "LlamaRMSNorm"}  # fmt: skip


def case(name: str, form: str) -> tuple[Any, dict[str, Any]]:
    model = plain("llama", form, tie_word_embeddings=False)
    inside = {"target_modules": ["down_proj"]} if name == "self_attn" else {}
    inside = {"target_modules": ["q_proj"]} if name == "mlp" else inside
    return model, {"modules_to_save": [name], **inside}


@pytest.mark.each_value
@pytest.mark.parametrize("name", SAVED)
@forms
def test_a_copy_that_is_trained_is_the_plain_module(form: str, name: str) -> None:
    model, options = case(name, form)
    stock = wrapped(case(name, form)[0], **options)
    model = wrapped(patch(model, form), **options)
    names = {key: (p.shape, p.dtype) for key, p in trainable(stock).items()}
    assert names
    assert {key: (p.shape, p.dtype) for key, p in trainable(model).items()} == names
    assert {type(one.modules_to_save["default"]).__name__ for one in wrappers(model)} == {SAVED[name]}
    assert off(logits(model), logits(stock)) < REACH[form]
    assert set(peft.get_peft_model_state_dict(model)) == set(peft.get_peft_model_state_dict(stock))


@pytest.mark.each_value
@pytest.mark.parametrize("name", SAVED)
@forms
def test_unpatch_leaves_the_wrappers_and_what_was_trained(form: str, name: str) -> None:
    model, options = case(name, form)
    base = {id(module) for module in model.modules()}
    model = wrapped(patch(model, form), **options)
    before = {key: p.detach().clone() for key, p in trainable(model).items()}
    kept = {key: id(p) for key, p in trainable(model).items()}
    accelpatch.unpatch(model)
    assert {key: id(p) for key, p in trainable(model).items()} == kept
    assert all(torch.equal(p, before[key]) for key, p in trainable(model).items())
    stock = wrapped(case(name, form)[0], **options)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    assert all(id(one.original_module) in base for one in wrappers(model))
    assert off(logits(model), logits(stock)) < (0.6 if form == "int4" else REACH[form])


@forms
def test_wrapped_before_the_patch(form: str, tmp_path: Path) -> None:
    """The copies are PEFT's own and stay float; what they stand around is packed as ever."""
    model, stock = (wrapped(plain("llama", form, tie_word_embeddings=False), modules_to_save=["lm_head", "norm"])
                    for _ in range(2))  # fmt: skip
    patch(inner(model), form)
    sites = {site.path: site for site in inner(model).accelpatch.report().sites}
    assert sites["lm_head.modules_to_save.default"].replacer is None
    if form in ("int8", "int4"):
        assert sites["lm_head.original_module"].role == "head"
        assert sites["lm_head.original_module"].replacer == "int8_weight_only"
    assert off(logits(model), logits(stock)) < REACH[form]
    with model.disable_adapter(), stock.disable_adapter():
        assert off(logits(model), logits(stock)) < REACH[form]
    model.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(plain("llama", form, tie_word_embeddings=False), tmp_path).eval()
    torch.testing.assert_close(logits(fresh), logits(stock))
    accelpatch.unpatch(model)
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("form", ["exact", "int8"])
def test_trained_then_unpatched(form: str) -> None:
    """The head's copy learns on the patched model, and keeps what it learnt."""
    model = wrapped(patch(plain("llama", form, tie_word_embeddings=False), form), modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    parameters = list(trainable(model).values())
    optimizer, ids = torch.optim.SGD(parameters, lr=0.5), full_batch()["input_ids"]
    before, losses = [p.detach().clone() for p in parameters], []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    learnt = [p.detach().clone() for p in parameters]
    assert not torch.equal(learnt[0], before[0])
    due = logits(model)
    accelpatch.unpatch(model)
    assert all(torch.equal(p, q) for p, q in zip(trainable(model).values(), learnt, strict=True))
    assert off(logits(model), due) < 0.03


@pytest.mark.parametrize("order", ["patched-first", "wrapped-first"])
@pytest.mark.parametrize("form", ["exact", "int8"])
def test_trainable_tokens(form: str, order: str) -> None:
    options = {"trainable_token_indices": {"embed_tokens": [3, 5]}}
    stock = wrapped(plain("llama", form, tie_word_embeddings=False), **options)
    if order == "patched-first":
        model = wrapped(patch(plain("llama", form, tie_word_embeddings=False), form), **options)
    else:
        model = wrapped(plain("llama", form, tie_word_embeddings=False), **options)
        patch(inner(model), form)
    assert off(logits(model), logits(stock)) < REACH[form]
    accelpatch.unpatch(model)
    assert off(logits(model), logits(stock)) < REACH[form]
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]


@pytest.mark.parametrize("form", ["exact", "int8"])
def test_tuned_norms(form: str) -> None:
    """A norm that an adapter stands around is called as itself, also where its work is fused into its layer."""
    made = []
    for patched in (False, True):
        model = patch(plain("llama", form), form) if patched else plain("llama", form)
        model = peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["post_attention_layernorm"])).eval()
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.mul_(3)
        made.append(model)
    assert off(logits(made[1]), logits(made[0])) < REACH[form]
    accelpatch.unpatch(made[1])
    assert off(logits(made[1]), logits(made[0])) < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen3_moe"])
def test_of_other_families(name: str) -> None:
    saved = {"gemma2": "norm", "gpt2": "ln_f", "qwen3_moe": "norm"}[name]
    targets = ["c_attn"] if name == "gpt2" else ["q_proj"]
    options = {"modules_to_save": [saved], "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
    model = wrapped(accelpatch.patch(CAUSAL[name].make(), "int8", verify=False), **options)
    stock = wrapped(CAUSAL[name].make(), **options)
    assert off(logits(model), logits(stock)) < 0.05
    accelpatch.unpatch(model)
    assert torch.equal(logits(model), logits(stock))
