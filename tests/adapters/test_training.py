"""Adapters and float weights train on patched models: gradients in every family and format, checkpointing, autocast."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch import api
from accelpatch.modules.replacement import Replacement
from accelpatch.recipe.recipe import parse
from tests.support.foreign import READ, ROOT, expected
from tests.support.lora import RECIPES, config, peft
from tests.support.steps import inner
from tests.support.tiny import CAUSAL, EXPERTS, full_batch

FAMILIES = CAUSAL | EXPERTS
LINEAR = "extends: {}\nrules:\n  - name: linear\n    replace: {}\n    options: {}\n"
BITS: dict[str, Any] = RECIPES | {
    "nf4": parse(LINEAR.format("int4", "nf4_weight_only", "{group_size: 32}")),
    "mxfp4": parse(LINEAR.format("int4", "mxfp4_weight_only", "{}")),
    "fp8-weights": parse(LINEAR.format("int8", "fp8_weight_only", "{}")),
    "w8a8": parse("extends: int8\nrules:\n  - name: linear\n    replace: w8a8\n    options: {activations: dynamic}\n"
                  "calibrate: {alpha: null}\n"),
    "w8a8-fp8": parse("extends: int8\nrules:\n  - name: linear\n    replace: w8a8_fp8\n"),
    "train": "train",
}  # fmt: skip


def deterministic(model: Any) -> Any:
    """The model without dropout."""
    for module in model.modules():
        for name, value in vars(module).items():
            if ("dropout" in name or name in ("p", "layerdrop")) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def trained(model: Any, **changes: Any) -> Any:
    """A PeftModel in training mode."""
    torch.manual_seed(1)
    return deterministic(peft.get_peft_model(model, config(**changes)).train())


def gradients(model: Any, ids: Any = None) -> dict[str, torch.Tensor]:
    """The gradients of all that trains, after one call; every one is there and is not zero."""
    ids = full_batch()["input_ids"] if ids is None else ids
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert found
    assert [name for name, one in found.items() if one is None or not bool(one.any())] == []
    return found


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], most: float) -> None:
    assert one.keys() == other.keys()
    for name, due in other.items():
        assert float((one[name] - due).norm()) <= most * float(due.norm()), name


def rounded(model: Any, plain: Any) -> Any:
    """The plain model with the weights that the patched one holds."""
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, one in module.float_parameters().items() if isinstance(module, Replacement) else ():
                plain.get_submodule(path).get_parameter(name).copy_(one)
    return plain


@pytest.mark.parametrize("family, recipe", [
    *((family, "int4") for family in FAMILIES),
    *itertools.product(("llama", "gemma2", "gpt2", "mixtral", "gpt_oss"), ("exact", "int8")),
])  # fmt: skip
def test_every_adapter_gets_the_gradient_of_the_rounded_model(family: str, recipe: str) -> None:
    """PEFT's defaults name experts too, where a family has them."""
    model = accelpatch.patch(FAMILIES[family].make(), RECIPES[recipe], verify=False)
    plain = trained(rounded(model, FAMILIES[family].make()))
    near(gradients(trained(model)), gradients(plain), 2e-3)


@pytest.mark.parametrize("recipe", BITS)
def test_every_format_has_the_gradient_of_its_floats(recipe: str) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), BITS[recipe], verify=False)
    plain = trained(rounded(model, CAUSAL["llama"].make()))
    near(gradients(trained(model)), gradients(plain), 2e-3)


@pytest.mark.parametrize("name", READ)
def test_checkpoints_of_others_train(name: str) -> None:
    ids = expected(name)["input_ids"]
    model: Any = api.load(str(ROOT / name), dtype=torch.float32).model
    gradients(trained(model, target_modules=["k_proj", "down_proj"]), ids)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]},
                                     {"modules_to_save": ["embed_tokens"]}, {"lora_bias": True}],
                         ids=["dora", "rslora", "head", "embedding", "bias"])  # fmt: skip
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_kinds_of_adapters(changes: dict[str, Any], recipe: str) -> None:
    model = accelpatch.patch(CAUSAL["qwen2"].make(), RECIPES[recipe], verify=False)
    plain = trained(rounded(model, CAUSAL["qwen2"].make()), **changes)
    near(gradients(trained(model, **changes)), gradients(plain), 2e-3)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("recipe", ["int8", "w8a8", "train"])
def test_gradient_checkpointing_changes_nothing(recipe: str, reentrant: bool) -> None:
    made = [trained(accelpatch.patch(CAUSAL["llama"].make(), BITS[recipe], verify=False)) for _ in range(2)]
    made[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
    made[1].enable_input_require_grads()
    near(gradients(made[1]), gradients(made[0]), 1e-5)


@pytest.mark.parametrize("recipe", ["int8", "int4", "train"])
def test_under_autocast(recipe: str) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), BITS[recipe], verify=False)
    plain = trained(rounded(model, CAUSAL["llama"].make()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(gradients(trained(model)), gradients(plain), 0.1)


def test_norms_embeddings_and_kept_layers_train() -> None:
    keep = "extends: int8\nrules:\n  - name: kept\n    match: {name: '*.o_proj'}\n    replace: keep\n"
    model = accelpatch.patch(CAUSAL["mistral"].make(), parse(keep), verify=False).train()
    found = gradients(model)
    assert {name.split(".")[-2] for name in found} >= {"embed_tokens", "norm", "input_layernorm", "o_proj"}


def test_fast_steps_come_back_after_training_and_see_what_was_learnt() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), RECIPES["int8"], verify=False).train()
    before = model.generate(**full_batch(), max_new_tokens=6, do_sample=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        gradients(model)
        optimizer.step()
    paths = model.accelpatch.report().paths
    paths.clear()
    after = model.generate(**full_batch(), max_new_tokens=6, do_sample=False)
    assert paths == {"modules: a prompt, or no cache": 1, "native step": 5}
    assert not torch.equal(before, after)
    with torch.no_grad():
        due = rounded(model, CAUSAL["llama"].make())
        for name, one in model.named_parameters():
            due.get_parameter(name).copy_(one)
    assert torch.equal(after, due.generate(**full_batch(), max_new_tokens=6, do_sample=False))


def test_dropout_in_training_mode_is_no_fast_step() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(attention_dropout=0.1), RECIPES["int8"], verify=False).train()
    model.generate(**full_batch(), max_new_tokens=3, do_sample=False)
    assert not any(path == "native step" for path in model.accelpatch.report().paths)
    model.eval()
    model.generate(**full_batch(), max_new_tokens=3, do_sample=False)
    assert model.accelpatch.report().paths["native step"] == 2


def test_adapters_swap_stack_disable_save_and_load(tmp_path: Any) -> None:
    """As on the plain model with the same weights."""
    model = accelpatch.patch(CAUSAL["llama"].make(), RECIPES["int8"], verify=False)
    plain = rounded(model, CAUSAL["llama"].make())
    both = [trained(one).eval() for one in (model, plain)]
    for one in both:
        torch.manual_seed(2)
        one.add_adapter("other", config(rank=2))
    ids = full_batch()["input_ids"]
    for one, name in itertools.product(both, ("default", "other")):
        one.save_pretrained(tmp_path / str(one is both[0]), selected_adapters=[name])
    with torch.no_grad():
        for change in (lambda m: m.set_adapter("other"), lambda m: m.base_model.set_adapter(["default", "other"])):
            for one in both:
                change(one)
            torch.testing.assert_close(both[0](ids).logits, both[1](ids).logits, rtol=0, atol=2e-3)
        with both[0].disable_adapter(), both[1].disable_adapter():
            torch.testing.assert_close(both[0](ids).logits, both[1](ids).logits, rtol=0, atol=2e-3)
        due = both[0](ids).logits
    fresh = accelpatch.patch(CAUSAL["llama"].make(), RECIPES["int8"], verify=False)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "True")
    loaded.load_adapter(tmp_path / "False" / "other", "other")
    loaded.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, due, rtol=0, atol=1e-5)
    assert isinstance(inner(loaded), nn.Module)
