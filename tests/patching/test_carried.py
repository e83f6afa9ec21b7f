"""What was done to a patched model is still there after `unpatch`, or `unpatch` says what is in its way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn.utils import parametrize

import accelpatch
from accelpatch.errors import PatchError
from tests.support.packed import FORMS, patch, plain, replacements
from tests.support.simulated import logits
from tests.support.tiny import LAYERS, full_batch, snapshot

forms = pytest.mark.parametrize("form", FORMS)
some = pytest.mark.parametrize("form", ["exact", "int8"])
PLACES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


# Hooks of accelerate that come after the patch -> what hangs them on.
HOOKS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu-buffers": lambda model, folder: cpu_offload(model, torch.device("cpu"), offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device=torch.device("cpu")),
    "dispatched": lambda model, folder: dispatch_model(
        model, device_map=dict.fromkeys(PLACES, "cpu"), force_hooks=True
    ),
    "one": lambda model, folder: add_hook_to_module(model.model.layers[0].mlp, ModelHook()),
}


@pytest.mark.parametrize("kind", HOOKS)
@some
def test_hooks_of_accelerate_that_came_later(form: str, kind: str, tmp_path: Path) -> None:
    model = plain("mistral")
    before = snapshot(model)
    patch(model, form)
    output = logits(model, full_batch())
    HOOKS[kind](model, tmp_path)
    if kind != "cpu-buffers" or form == "exact":
        torch.testing.assert_close(logits(model, full_batch()), output)
    state = snapshot_of_tree(model)
    with pytest.raises(PatchError, match=r"remove_hook_from_module\(model, recurse=True\) first"):
        accelpatch.unpatch(model)
    assert snapshot_of_tree(model) == state, "nothing was changed"
    remove_hook_from_module(model, recurse=True)
    accelpatch.unpatch(model)
    assert replacements(model) == []
    after = snapshot(model)
    assert {key: value[2:] for key, value in after.items() if key.endswith("weight")} == {
        key: value[2:] for key, value in before.items() if key.endswith("weight")
    }
    torch.testing.assert_close(logits(model, full_batch()), logits(plain("mistral"), full_batch()))


def snapshot_of_tree(model: nn.Module) -> list[tuple[str, int, bool]]:
    return [(name, id(module), "_hf_hook" in vars(module)) for name, module in model.named_modules()]


@some
def test_hooks_of_accelerate_that_went_while_patched(form: str) -> None:
    model = plain("mistral")
    dispatch_model(model, device_map=dict.fromkeys(PLACES, "cpu"), force_hooks=True)
    patch(model, form)
    remove_hook_from_module(model, recurse=True)
    accelpatch.unpatch(model)
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    assert torch.equal(logits(model, full_batch()), logits(plain("mistral"), full_batch()))


def halved(form: str) -> Any:
    model = plain("llama", form)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@forms
def test_a_loaded_state_survives_whole(form: str, assign: bool) -> None:
    model, other = patch(plain("llama", form), form), patch(halved(form), form)
    model.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=assign)
    due = logits(other, full_batch())
    assert torch.equal(logits(model, full_batch()), due)
    if form in ("exact", "compact"):
        accelpatch.unpatch(model)
        assert all(torch.equal(v, halved(form).state_dict()[k]) for k, v in model.state_dict().items())
        return
    with pytest.warns(UserWarning, match="written while they were packed"):
        accelpatch.unpatch(model)
    found = logits(model, full_batch())
    assert (found - due).norm() / due.norm() < {"int8": 0.05, "fp8": 0.2, "int4": 0.6}[form]
    assert replacements(model) == []


@pytest.mark.parametrize("strict", [True, False])
@forms
def test_a_float_state_is_loaded_into_a_patched_model(form: str, strict: bool) -> None:
    model, other = patch(plain("llama", form), form), patch(halved(form), form)
    result = model.load_state_dict(halved(form).state_dict(), strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(logits(model, full_batch()), logits(other, full_batch()))


def test_a_state_that_changes_nothing_leaves_the_originals() -> None:
    model = plain()
    before = snapshot(model)
    accelpatch.patch(model, "int8", verify=False)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(plain().state_dict())
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_a_float_weight_of_another_shape_or_not_finite_is_an_error() -> None:
    model = accelpatch.patch(plain("mistral"), "int8", verify=False)
    state, before = plain("mistral").state_dict(), logits(model, full_batch())
    key = "model.layers.0.mlp.up_proj.weight"
    for bad, message in ((torch.zeros(3, 64), "is packed here"), (torch.full((96, 64), float("nan")), "not finite")):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state | {key: bad})
        assert torch.equal(logits(model, full_batch()), before)


def new_head() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(64, 160, bias=False)


SETS: dict[str, Callable[[Any], Any]] = {
    "output-embeddings": lambda model: model.set_output_embeddings(new_head()),
    "input-embeddings": lambda model: model.set_input_embeddings(nn.Embedding.from_pretrained(new_head().weight)),
    "attribute": lambda model: setattr(model, "lm_head", new_head()),
    "norm": lambda model: setattr(model.model, "norm", nn.LayerNorm(64)),
    "wrapped": lambda model: setattr(model.model, "norm", nn.Sequential(model.model.norm, new_head_like())),
    "mlp": lambda model: setattr(model.model.layers[1], "mlp", nn.Linear(64, 64)),
    "inner": lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(64, 96, bias=False)),
    "fewer-layers": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "layer-again": lambda model: model.model.layers.append(model.model.layers[0]),
    "child": lambda model: model.model.layers[0].add_module("extra", nn.Identity()),
}


def new_head_like() -> nn.Linear:
    torch.manual_seed(8)
    return nn.Linear(64, 64)


@pytest.mark.parametrize("change", SETS)
@pytest.mark.parametrize("form", ["exact", "int8", "int4"])
def test_parts_that_the_user_set_stay(form: str, change: str) -> None:
    """As in a model that was never patched."""
    model, stock = patch(plain("llama"), form), plain("llama")
    for one in (model, stock):
        torch.manual_seed(9)
        SETS[change](one)
        one.config.num_hidden_layers = len(one.model.layers)
    accelpatch.unpatch(model)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    for (name, found), (_, due) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert torch.equal(found, due), name
    batch = full_batch() | {"use_cache": False}
    assert torch.equal(logits(model, batch), logits(stock, batch))


@some
def test_training_mode_and_checkpointing(form: str) -> None:
    model = patch(plain("llama"), form)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[0].mlp.note = "mine"
    model.model.layers[1].register_buffer("beside", torch.ones(2))
    accelpatch.unpatch(model)
    assert all(module.training for module in model.modules())
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True] * LAYERS
    assert model.model.layers[0].mlp.note == "mine"
    assert model.model.layers[1].beside.equal(torch.ones(2))
    model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()
    model.eval()
    assert torch.equal(logits(model, full_batch()), logits(plain("llama"), full_batch()))


@some
def test_a_parameter_that_was_replaced(form: str) -> None:
    model = patch(plain("qwen2"), form)
    model.model.norm.weight = nn.Parameter(torch.full((64,), 3.0))
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.full((64,), 0.5))
    output = logits(model, full_batch())
    accelpatch.unpatch(model)
    assert model.model.norm.weight.eq(3).all()
    assert model.model.layers[0].self_attn.q_proj.bias.eq(0.5).all()
    assert (logits(model, full_batch()) - output).norm() / output.norm() < 0.05


@some
def test_a_number_that_was_set(form: str) -> None:
    """A norm's epsilon is the original's own attribute."""
    model, stock = patch(plain("llama"), form), plain("llama")
    for one in (model, stock):
        for layer in one.model.layers:
            layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 4.0
    found, due = logits(model, full_batch()), logits(stock, full_batch())
    assert (found - due).norm() / due.norm() < 0.05
    accelpatch.unpatch(model)
    assert torch.equal(logits(model, full_batch()), due)


@some
def test_a_forward_on_a_replacement_is_in_the_way(form: str) -> None:
    model = patch(plain("mistral"), form)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)
    before = snapshot_of_tree(model)
    with pytest.raises(PatchError, match=r"forward was put on the instance after the patch .model\.layers\.0\.mlp"):
        accelpatch.unpatch(model)
    assert snapshot_of_tree(model) == before
    del mlp.forward
    accelpatch.unpatch(model)
    assert torch.equal(logits(model, full_batch()), logits(plain("mistral"), full_batch()))


def test_a_compiled_layer_comes_back_uncompiled() -> None:
    model = accelpatch.patch(plain("mistral"), "exact", verify=False)
    model.model.layers[0].compile(backend="eager")
    due = logits(model, full_batch())
    accelpatch.unpatch(model)
    assert model.model.layers[0]._compiled_call_impl is None
    torch.testing.assert_close(logits(model, full_batch()), due, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("form", ["exact", "compact"])
def test_a_parametrisation_is_in_the_way(form: str) -> None:
    model = patch(plain("llama"), form)
    parametrize.register_parametrization(model.model.norm, "weight", nn.Identity())
    with pytest.raises(PatchError, match=r"model\.norm"):
        accelpatch.unpatch(model)
    parametrize.remove_parametrizations(model.model.norm, "weight")
    accelpatch.unpatch(model)


@some
def test_buffers_that_are_not_saved_stay_so(form: str) -> None:
    model = patch(plain("llama"), form)
    model.model.layers[0].mlp.register_buffer("seen", torch.ones(2), persistent=False)
    model.model.layers[0].mlp.register_buffer("kept", torch.ones(2))
    accelpatch.unpatch(model)
    assert torch.equal(model.model.layers[0].mlp.seen, torch.ones(2))
    assert [name for name in model.state_dict() if name.endswith(("seen", "kept"))] == ["model.layers.0.mlp.kept"]
