"""What a user does with a patched model: moves, copies, compiles and inspects it, then takes the patch off."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.patching.apply import Handle
from tests.support.simulated import greedy, logits, simulated
from tests.support.tiny import CAUSAL, full_batch, padded_batch, snapshot

RECIPES = ("exact", "int8", "int4")


def call(model: nn.Module) -> torch.Tensor:
    return logits(model, padded_batch())


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dtype_given_after_the_patch(recipe: str, name: str, dtype: torch.dtype) -> None:
    model, twin = CAUSAL[name].make(), CAUSAL[name].make()
    plan = accelpatch.plan(model, recipe)
    originals = {path: module for path, module in model.named_modules() if path}
    accelpatch.patch(model, recipe)
    scales = {key: t.clone() for key, t in model.state_dict().items() if key.endswith((".scale", ".offset", ".q"))}
    assert model.to(dtype) is model
    for key, before in scales.items():
        after = model.state_dict()[key]
        assert after.dtype == before.dtype, key
        assert after.equal(before), key
    assert {m.weight.dtype for _, m in model.named_modules() if hasattr(m, "own_layout")} <= {dtype}
    held = simulated(twin, plan, torch.float64)
    output = call(model)
    assert output.dtype == dtype
    reach = {torch.bfloat16: 0.08, torch.float16: 0.02, torch.float64: 1e-5}[dtype]
    # float64 attention has NaN behind padding: rows of full length
    reference = logits(held, full_batch())
    error = (logits(model, full_batch()).double() - reference).norm() / reference.norm()
    assert error < reach
    accelpatch.unpatch(model)
    assert {path: module for path, module in model.named_modules() if path} == originals
    twin.to(dtype)
    for (key, got), (_, due) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert got.dtype == due.dtype == dtype, key
        assert got.equal(due), key
    assert logits(model, full_batch()).equal(logits(twin, full_batch()))


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.eval()],
    ids=["to", "cpu", "float", "eval"],
)
def test_moves_that_change_nothing(move: Any) -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    accelpatch.patch(model, "int8")
    output = call(model)
    move(model)
    assert call(model).equal(output)
    accelpatch.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "name", [pytest.param("llama", id="llama", marks=pytest.mark.smoke), "gemma2", "gpt2", "mixtral"]
)
def test_a_deep_copy_is_independent(name: str) -> None:
    model = CAUSAL[name].make()
    before, original = snapshot(model), call(model)
    accelpatch.patch(model, "int8")
    output = call(model)
    twin = copy.deepcopy(model)
    assert call(twin).equal(output)
    shared = {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
    assert shared == set()
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    assert call(twin).equal(output)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert call(twin).equal(output)
    accelpatch.unpatch(twin)
    assert call(twin).equal(original)
    assert type(twin) is type(model)
    assert not hasattr(twin, "accelpatch")
    assert {type(m) for m in twin.modules()} == {type(m) for m in model.modules()}
    accelpatch.patch(twin, "int4")


@pytest.mark.parametrize(
    "name, recipe, backend",
    [
        pytest.param("llama", "int8", "aot_eager", id="llama-int8-aot_eager"),
        pytest.param("qwen3", "int4", "eager", id="qwen3-int4"),
        pytest.param("gemma2", "exact", "eager", id="gemma2-exact"),
        pytest.param("gpt2", "int8", "eager", id="gpt2-int8"),
    ],
)
def test_torch_compile(name: str, recipe: str, backend: str) -> None:
    model, batch = CAUSAL[name].make(), full_batch() | {"use_cache": False}
    torch.compiler.reset()
    logits(torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), batch)  # the original is one graph
    with accelpatch.patched(model, recipe):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(logits(compiled, batch), logits(model, batch), rtol=1e-5, atol=1e-6)
        with pytest.raises(PatchError, match="compiled; patch the original"):
            accelpatch.patch(compiled, recipe)
    torch.compiler.reset()


def test_a_compiled_model_is_refused() -> None:
    model = CAUSAL["llama"].make()
    with pytest.raises(PatchError, match="compiled; patch the original model first"):
        accelpatch.patch(torch.compile(model, backend="eager"), "int8")
    model.compile(backend="eager")
    with pytest.raises(PatchError, match="compiled; patch the original model first"):
        accelpatch.patch(model, "int8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_names(recipe: str) -> None:
    model = CAUSAL["mistral"].make()
    before = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
    plan = accelpatch.plan(model, recipe)
    rounded = {path for e in plan.replaced if e.replacer and e.replacer.rounds for path in e.site.paths}
    with accelpatch.patched(model, recipe):
        after = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
        foreign = {key for key in after if key.rpartition(".")[0] in rounded}
        untouched = {key: facts for key, facts in before.items() if key.rpartition(".")[0] not in rounded}
        assert {key: facts for key, facts in after.items() if key not in foreign} == untouched
        assert all(key.endswith((".q", ".scale", ".offset")) for key in foreign)
        assert bool(foreign) == (recipe != "exact")
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()} == before


def test_a_patched_state_dict_loads_into_a_patched_model() -> None:
    model, other = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    for one in (model, other):
        accelpatch.patch(one, "int4")
    assert not call(other).equal(call(model))
    other.load_state_dict(model.state_dict())
    assert call(other).equal(call(model))


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda model, folder: model.model.save_pretrained(folder), id="save_pretrained"),
        pytest.param(lambda model, folder: model.model.push_to_hub("somebody/something"), id="push_to_hub"),
        pytest.param(lambda model, folder: model.resize_token_embeddings(200), id="resize_token_embeddings"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(action: Any, tmp_path: Any) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8")
    with pytest.raises(PatchError, match=r"accelpatch\.unpatch\(model\)"):
        action(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    accelpatch.unpatch(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert call(again.eval()).equal(call(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3"])
def test_tie_weights_of_a_patched_tied_model(name: str) -> None:
    model = CAUSAL[name].make()
    before = snapshot(model)
    accelpatch.patch(model, "int8")
    output, keys = call(model), list(model.state_dict())
    model.tie_weights()
    assert call(model).equal(output)
    assert list(model.state_dict()) == keys
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.layout is table.layout
    assert head.weight.equal(table.weight)
    accelpatch.unpatch(model)
    model.tie_weights()
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "opt"])
def test_replacements_are_instances_of_what_they_replace(name: str) -> None:
    model = CAUSAL[name].make()
    classes = {path: type(module) for path, module in model.named_modules()}
    accelpatch.patch(model, "int8")
    assert {path: isinstance(module, classes[path]) for path, module in model.named_modules()} == dict.fromkeys(
        classes, True
    )
    for path, module in model.named_modules():
        if hasattr(module, "own_layout"):
            assert module.weight.shape == CAUSAL[name].make().get_submodule(path).weight.shape
    assert type(model).__name__ == classes[""].__name__


def test_the_handle() -> None:
    model = CAUSAL["llama"].make()
    assert not hasattr(model, "accelpatch")
    accelpatch.patch(model, "int8")
    handle = model.accelpatch
    assert isinstance(handle, Handle)
    assert handle.report().replaced == len(handle.plan.replaced)
    assert all(entry.site.module is None for entry in handle.plan.entries)
    assert "int8_weight_only" in str(handle.plan)
    assert str(handle.report())
    assert handle.report().to_dict()["verification"]["failures"] == []
    handle.unpatch()
    assert not hasattr(model, "accelpatch")
    with pytest.raises(PatchError, match="is not patched"):
        accelpatch.unpatch(model)


def test_patched_undoes_after_an_exception() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    with accelpatch.patched(model, "int8") as inside:
        assert inside is model
        assert hasattr(model, "accelpatch")
    with pytest.raises(ZeroDivisionError), accelpatch.patched(model, "int8"):
        raise ZeroDivisionError
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_originals_that_are_not_kept_are_gone(name: str) -> None:
    model = CAUSAL[name].make()
    plan = accelpatch.plan(model, "int8")
    paths = [path for entry in plan.replaced if entry.replacer and entry.replacer.rounds for path in entry.site.paths]
    weights = [weakref.ref(model.get_submodule(path).weight) for path in paths]
    modules = [weakref.ref(model.get_submodule(path)) for path in paths]
    del plan
    expected = simulated(model, accelpatch.plan(model, "int8"), torch.float32)
    accelpatch.patch(model, "int8", keep_original="none")
    gc.collect()
    assert [ref() for ref in weights + modules] == [None] * (2 * len(paths))
    torch.testing.assert_close(call(model), call(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(PatchError, match=r"originals were freed .* keep_original='cpu'"):
        accelpatch.unpatch(model)
    assert greedy(model, padded_batch()).equal(greedy(expected, padded_batch()))
    assert hasattr(model, "accelpatch")


def test_what_rounds_nothing_needs_no_originals() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    accelpatch.patch(model, "exact", keep_original="none")
    accelpatch.unpatch(model)
    assert snapshot(model) == before
