"""What was done to a patched model is still there after `unpatch`, or `unpatch` says what is in its way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from tests.families.simulated import logits
from tests.families.tiny import CAUSAL, LAYERS, full_batch, snapshot
from tests.support.packed import PATCHES, plain

FORMS = ("exact", *PATCHES)
forms = pytest.mark.parametrize("form", FORMS)
some = pytest.mark.parametrize("form", ["exact", "int8"])
PLACES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def patch(model: Any, form: str) -> Any:
    return accelpatch.patch(model, "exact", verify=False) if form == "exact" else PATCHES[form](model)


def replacements(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(type(module), "replaced_class")]


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
    for bad, message in ((torch.zeros(3, 64), "size mismatch"), (torch.full((96, 64), float("nan")), "not finite")):
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


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_casts_round_as_they_do_without_the_patch(recipe: str) -> None:
    for casts in (("bfloat16", "float"), ("half", "float"), ("half", "bfloat16"), ("double", "float")):
        model, stock = accelpatch.patch(plain("llama"), recipe, verify=False), plain("llama")
        for one in (model, stock):
            for cast in casts:
                getattr(one, cast)()
        accelpatch.unpatch(model)
        for (name, found), (_, due) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
            assert found.dtype == due.dtype, name
            assert torch.equal(found, due), (name, casts)


def test_casts_of_lossless_weights() -> None:
    model, stock = PATCHES["compact"](plain("llama", "compact")), plain("llama", "compact")
    for one in (model, stock):
        one.half().bfloat16()
    assert logits(model, full_batch()).dtype == torch.bfloat16
    assert all(torch.equal(v, stock.state_dict()[k]) for k, v in model.state_dict().items())
    accelpatch.unpatch(model)
    assert all(torch.equal(v, stock.state_dict()[k]) for k, v in model.state_dict().items())


AUTOCAST = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@AUTOCAST
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "qwen3", "mixtral"])
@forms
def test_autocast_gives_the_dtypes_of_the_stock_model(form: str, name: str, dtype: torch.dtype) -> None:
    if form == "compact" and dtype == torch.float16 and name in ("gpt2", "opt"):
        pytest.skip("torch's LayerNorm takes no bfloat16 weight with float16 activations")
    model, stock = patch(plain(name, form), form), plain(name, form)
    given: dict[str, Any] = full_batch() | {"output_hidden_states": True}
    with torch.no_grad(), torch.autocast("cpu", dtype):
        found, due = model(**given), stock(**given)
    assert found.logits.dtype == due.logits.dtype
    assert [h.dtype for h in found.hidden_states] == [h.dtype for h in due.hidden_states]
    error = (found.logits.float() - due.logits.float()).norm() / due.logits.float().norm()
    assert error < {"exact": 0.05, "int8": 0.05, "compact": 0.05, "fp8": 0.2, "int4": 0.6}[form]
    with torch.autocast("cpu", dtype):
        ids = model.generate(**full_batch(), max_new_tokens=4, do_sample=False)
    assert ids.shape == (3, 13)


REFUSED: dict[str, Callable[[Any, Path], Any]] = {
    "resize": lambda model, folder: model.resize_token_embeddings(600),
    "save": lambda model, folder: model.save_pretrained(folder),
    "push": lambda model, folder: model.push_to_hub("somebody/something"),
}


@pytest.mark.parametrize("action", REFUSED)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])
def test_what_the_model_refuses_its_parts_refuse_too(name: str, action: str, tmp_path: Path) -> None:
    model = accelpatch.patch(CAUSAL[name].make(), "int8", verify=False)
    inside = [part for part in model.modules() if hasattr(type(part), "resize_token_embeddings")]
    assert len(inside) >= 2
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
