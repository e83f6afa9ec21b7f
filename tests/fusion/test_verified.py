"""Fused layers are verified by the patch: what is wrong in a cached step alone is found, and costs its own layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.device import probe
from accelpatch.errors import PatchError, VerifyError
from accelpatch.fusion import fused_layer, native_model, read_layers
from accelpatch.fusion.attention_description import AttentionDescription
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.recipe.recipe import load, parse
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import CAUSAL, full_batch, make, padded_batch

reason = libraries.why_not("cpu", probe("cpu"))
native = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
LAYERS, BAD = 4, 2
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")


def made() -> Any:
    return CAUSAL["llama"].make(num_hidden_layers=LAYERS)


def layers(model: Any) -> list[Any]:
    return [site for site in model.accelpatch.report().sites if site.role == "layer"]


def assert_one_layer_is_out(model: Any) -> None:
    records = layers(model)
    assert [site.fused for site in records] == [place != BAD for place in range(LAYERS)]
    assert [site.failed for site in records] == [place == BAD for place in range(LAYERS)]
    assert records[BAD].kernel_error > 10 * records[BAD].kernel_bound
    assert "in a prompt and 2 cached steps it is" in records[BAD].by_modules
    text = str(model.accelpatch.report())
    assert f"{LAYERS - 1} of {LAYERS} layers fused" in text
    assert f"model.layers.{BAD}: in a prompt" in text.splitlines()[1]
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    for batch in (full_batch(), padded_batch()):
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
    assert any(f"modules in layers [{BAD}]: in a prompt" in path for path in model.accelpatch.report().paths)


def wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a cached step is wrong in one layer, by a tenth; prompts and modules are right."""
    stock = fused_layer.decode_attention_
    seen: list[int] = []

    def wrong(qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        y = stock(qkv, positions, slot, mask, keys, *rest)
        if id(rest[1]) not in seen:
            seen.append(id(rest[1]))
        return y * 1.1 if seen.index(id(rest[1])) == BAD else y

    monkeypatch.setattr(fused_layer, "decode_attention_", wrong)


def test_a_cached_step_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    wrong_step(monkeypatch)
    assert_one_layer_is_out(accelpatch.patch(made(), "exact"))


def test_without_verification_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    wrong_step(monkeypatch)
    model = accelpatch.patch(made(), "exact", verify=False)
    assert all(site.fused and not site.steps for site in layers(model))


@native
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_a_native_step_that_is_wrong_is_found(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, seen = native_model.layer_weights, []

    def wrong(layer: Any, *given: Any) -> Any:
        seen.append(1)
        weights = stock(layer, *given)
        return replace(weights, window=3) if layer.attention.module.layer_idx == BAD else weights

    monkeypatch.setattr(native_model, "layer_weights", wrong)
    assert_one_layer_is_out(accelpatch.patch(made(), recipe))
    assert seen


@native
def test_a_softcap_that_the_modules_do_not_apply_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionDescription, "score_cap", 0.5)
    model = accelpatch.patch(CAUSAL["gemma3"].make(), "int8")
    assert not any(site.fused for site in layers(model))
    model.generate(**full_batch(), **GREEDY)
    assert NATIVE not in model.accelpatch.report().paths


@native
def test_an_error_where_the_recipe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionDescription, "score_cap", 0.5)
    recipe = load("int8")
    recipe = replace(recipe, verify=replace(recipe.verify, on_failure="error"))
    model = CAUSAL["gemma3"].make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(VerifyError, match=r"^model\.layers\.0: in a prompt and 2 cached steps .* nothing was changed$"):
        accelpatch.patch(model, recipe)
    assert_as_before(model, before)


@pytest.mark.parametrize("recipe", ["exact", "int8"])
@pytest.mark.parametrize("call", [0, 3])
def test_no_memory_for_the_fused_weights(recipe: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    stock, calls = read_layers.concatenated_linear, []

    def refused(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > call:
            raise torch.OutOfMemoryError("planted")
        return stock(*given)

    monkeypatch.setattr(read_layers, "concatenated_linear", refused)
    model = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PatchError, match="the fused layers: out of memory while their weights were laid out"):
        accelpatch.patch(model, "exact" if recipe == "exact" else rows())
    assert_as_before(model, before)


def rows() -> Any:
    """int8 with one scale a row, as on a GPU."""
    text = "extends: int8\nrules:\n  - name: linear\n    replace: int8_weight_only\n    options: {group_size: null}\n"
    return parse(text)


def assert_as_before(model: Any, before: dict[str, Tensor]) -> None:
    assert not hasattr(model, "accelpatch")
    assert not any(type(module).__module__.startswith("accelpatch") for module in model.modules())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.each_value
@native
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", CAUSAL)
def test_the_plan_says_what_comes(name: str, recipe: str) -> None:
    model: Any = CAUSAL[name].make()
    planned = [(site.path, site.fused, site.kernel) for site in accelpatch.plan(model, recipe).report().sites]
    accelpatch.patch(model, recipe)
    assert not any(site.failed for site in layers(model))
    for (path, fused, kernel), site in zip(planned, model.accelpatch.report().sites, strict=True):
        assert (path, fused) == (site.path, site.fused)
        if fused is not None and fused:
            assert kernel == site.kernel == "native step"
            assert site.steps


@native
@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "Model"])
def test_the_plan_promises_no_fused_layers_where_nothing_is_generated(suffix: str) -> None:
    model: Any = make("Llama", suffix=suffix, **CAUSAL["llama"].config)
    assert not any(site.fused for site in accelpatch.plan(model, "int8").report().sites)
    accelpatch.patch(model, "int8")
    assert not any(site.fused for site in layers(model))


@native
def test_fused_layers_that_no_sample_reaches_are_said_to_be_unverified() -> None:
    model = made()
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([[5]])).past_key_values
    accelpatch.patch(model, "int8", inputs=[{"input_ids": torch.tensor([[7, 8, 9]]), "past_key_values": cache}])
    assert "4 fused layers are not verified: no sample that steps can run reached them" in str(
        model.accelpatch.report()
    )


def _moved(model: Any) -> None:
    model.model.layers[BAD].mlp.down_proj.weight.data.mul_(1.5)


def _hooked(model: Any) -> None:
    model.model.layers[BAD].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


@pytest.mark.parametrize("change", [_moved, _hooked])
@pytest.mark.parametrize("device", ["as on a GPU", pytest.param("cpu", marks=native)])
def test_changes_after_the_patch_are_seen(
    change: Callable[[Any], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        as_on_a_gpu(monkeypatch)
    model = accelpatch.patch(made(), "exact")
    first = model.generate(**full_batch(), **GREEDY)
    change(model)
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    again = model.generate(**full_batch(), **GREEDY)
    assert torch.equal(again, plain.generate(**full_batch(), **GREEDY))
    assert not torch.equal(first, again)
