"""SmoothQuant on every family: what is replaced, the way back, casts, copies, saved states, and written weights."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.fusion.verified import BOUND, bound_of
from accelpatch.models.family import norm_of
from accelpatch.models.smoothing import smoothing_groups
from accelpatch.modules.quantized_linear import W8A8Linear
from accelpatch.patching.verify import UNITS
from accelpatch.quant import int8
from accelpatch.recipe.recipe import parse
from tests.support.simulated import greedy, logits
from tests.support.smoothing import calibrated, hooked, made_up
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, Tiny, full_batch, padded_batch, snapshot

FAMILIES = {name: tiny for name, tiny in CAUSAL.items() if tiny.linears}
RECIPES = ("smoothquant", "smoothquant-static")
SOME = ("llama", "gemma3", "gpt2", "bloom", "opt", "phi3", "cohere2")
some = pytest.mark.parametrize("name", SOME)


def patched(name: str, recipe: Any = "smoothquant", dtype: torch.dtype = torch.float32) -> Any:
    model = CAUSAL[name].make(dtype)
    return accelpatch.patch(model, recipe, verify=False, statistics=calibrated(model))


def smoothed_in(model: Any) -> list[W8A8Linear]:
    return [module for module in model.modules() if isinstance(module, W8A8Linear) and module.factors is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_layers_are_held_to_steps_of_int8_activations(recipe: str) -> None:
    model = patched("gemma", recipe)
    assert len(model.model.layers) == 2
    for layer in model.model.layers:
        assert bound_of(layer, torch.float32) == BOUND * UNITS[torch.bfloat16] / UNITS[torch.float32]


@pytest.mark.each_value
@spread("tiny, recipe", FAMILIES, RECIPES)
def test_every_family_and_the_way_back(tiny: Tiny, recipe: str) -> None:
    model, batch = tiny.make(), full_batch()
    groups = smoothing_groups(model)
    statistics, before, due = calibrated(model), snapshot(model), logits(model, batch)
    accelpatch.patch(model, recipe, statistics=statistics)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert [site.path for site in report.sites if site.unverified] == []
    taken = Counter(site.role for site in report.sites if site.replacer == "w8a8")
    assert taken == tiny.linears
    assert model.accelpatch.plan.groups == tuple(groups)
    for group in groups:
        for path in group.consumers:
            assert isinstance(model.get_submodule(path), W8A8Linear)
            assert model.get_submodule(path).factors is not None
    assert not logits(model, batch).equal(due)
    assert logits(model, batch).sub(due).norm() < 0.3 * due.norm()
    greedy(model, padded_batch())
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    assert logits(model, batch).equal(due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*SOME, "gemma", "helium"])
def test_a_norm_holds_its_part_of_the_smoothing_exactly(name: str, dtype: torch.dtype) -> None:
    """One that multiplies by 1 + weight too, whose weight lies near -1 for large factors."""
    model, plain = CAUSAL[name].make(dtype), CAUSAL[name].make(dtype)
    before = snapshot(model)
    accelpatch.patch(model, "smoothquant", verify=False, statistics=made_up(model, 0.05, 900))
    for group in smoothing_groups(plain):
        kind, new = norm_of(plain.get_submodule(group.source)), model.get_submodule(group.source)
        if kind is None:
            continue
        factors, one = model.get_submodule(group.consumers[0]).factors, float(kind.plus_one)
        due = plain.get_submodule(group.source).weight.detach().float() + one
        assert factors.max() > 20
        assert bool(factors.isfinite().all())
        torch.testing.assert_close((new.weight.detach().float() + one) * factors, due, rtol=1e-5, atol=0)
    accelpatch.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float16, torch.float32)], ids=["bfloat16", "there-and-back"]
)
@some
def test_casts_after_the_patch_reach_the_originals(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    model, twin = patched(name), CAUSAL[name].make()
    scales = [(module, module.factors.clone()) for module in smoothed_in(model)]
    for dtype in dtypes:
        model.to(dtype)
        twin.to(dtype)
    for module, factors in scales:
        assert module.factors.equal(factors)
    assert logits(model, full_batch()).dtype == dtypes[-1]
    accelpatch.unpatch(model)
    for (path, module), (_, other) in zip(model.named_modules(), twin.named_modules(), strict=True):
        assert vars(module).keys() == vars(other).keys(), path
    for (key, got), (_, due) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert got.dtype == due.dtype, key
        assert got.equal(due), key
    assert logits(model, full_batch()).equal(logits(twin, full_batch()))


@some
def test_a_copy_does_the_same_and_is_its_own(name: str) -> None:
    model = patched(name)
    twin, due = copy.deepcopy(model), logits(model, full_batch())
    assert logits(twin, full_batch()).equal(due)
    accelpatch.unpatch(twin)
    assert logits(model, full_batch()).equal(due)
    assert logits(twin, full_batch()).equal(logits(CAUSAL[name].make(), full_batch()))


@some
def test_a_copy_of_one_module_computes_the_same_in_its_place(name: str) -> None:
    """It is the plain module, whose inputs and neighbours are still smoothed."""
    model = CAUSAL[name].make()
    accelpatch.patch(model, "smoothquant", verify=False, statistics=made_up(model, 0.05, 60))
    batch = full_batch()
    for path in {
        path for group in smoothing_groups(CAUSAL[name].make())[:4] for path in (group.source, *group.consumers)
    }:
        module, seen = model.get_submodule(path), list[torch.Tensor]()
        with hooked(
            model, [path], lambda _, seen=seen: lambda module, args: seen.append(args[0].clone()), "forward_pre_hook"
        ):
            logits(model, batch)
        copied = copy.deepcopy(module)
        assert not isinstance(copied, W8A8Linear)
        with torch.no_grad():
            due, got = module(seen[0]), copied(seen[0])
        assert (got - due).norm() < 0.25 * due.norm(), path  # a copy does not round its input


@pytest.mark.parametrize("recipe", RECIPES)
@some
def test_a_state_comes_back(name: str, recipe: str) -> None:
    model = patched(name, recipe)
    state, due = copy.deepcopy(model.state_dict()), logits(model, full_batch())
    assert not any(key.endswith((".factors", ".divisors", ".like")) for key in state)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith(("norm.weight", "ln_1.weight", "bias")):
                tensor.zero_()
    smoothed_in(model)[0].weight.data.mul_(0.5)
    assert not logits(model, full_batch()).equal(due)
    model.load_state_dict(state)
    assert logits(model, full_batch()).equal(due)


@some
def test_float_weights_do_not_go_into_a_smoothed_model(name: str) -> None:
    """Its norms would be undivided, or its linear layers."""
    model, floats = patched(name), CAUSAL[name].make().state_dict()
    with pytest.raises(RuntimeError, match="takes no others: unpatch, load, and patch again"):
        model.load_state_dict(floats)
    alone = {key: value for key, value in floats.items() if key.endswith(("layernorm.weight", "ln_1.weight"))}
    if alone:
        with pytest.raises(RuntimeError, match="takes no others"):
            model.load_state_dict(alone, strict=False)


@pytest.mark.parametrize("path, kind", [("input_layernorm", "source"), ("self_attn.v_proj", "both")])
def test_a_group_whose_values_a_hook_sees_is_not_smoothed(path: str, kind: str) -> None:
    model = CAUSAL["llama"].make()
    handle = model.get_submodule(f"model.layers.0.{path}").register_forward_hook(lambda module, args, out: out + 0.3)
    due = logits(model, full_batch())
    accelpatch.patch(model, "smoothquant")
    assert "where a hook sees what would be divided" in str(model.accelpatch.report())
    far = (logits(model, full_batch()) - due).norm() / due.norm()
    assert far < 0.15, kind
    handle.remove()


def test_statistics_that_nothing_needs_are_mentioned() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", statistics=accelpatch.calibrate(model, samples=4, length=16))
    assert "no replacement of this recipe needs any" in str(model.accelpatch.report())


def test_it_calibrates_in_inference_mode() -> None:
    model = CAUSAL["llama"].make()
    with torch.inference_mode():
        accelpatch.patch(model, "smoothquant")
    assert model.accelpatch.report().verification.failures == []


@some
def test_a_weight_is_read_and_written_without_the_smoothing(name: str) -> None:
    model, plain = patched(name), CAUSAL[name].make()
    torch.manual_seed(5)
    deltas = {}
    for path, module in plain.named_modules():
        new: Any = model.get_submodule(path)
        if not isinstance(new, W8A8Linear):
            continue
        held = new.weight.detach().clone()
        assert (held - module.weight).norm() < 0.02 * module.weight.norm(), path
        deltas[path] = 0.3 * module.weight.std() * torch.randn(module.weight.shape)
        new.weight.data += deltas[path]
        torch.testing.assert_close(
            new.weight.detach(), held + deltas[path], rtol=0, atol=0.05 * float(held.abs().max())
        )
        module.weight.data += deltas[path]
    due = logits(plain, full_batch())
    assert (logits(model, full_batch()) - due).norm() < 0.3 * due.norm()
    with pytest.warns(UserWarning, match="weights were written"):
        accelpatch.unpatch(model)
    for path in deltas:
        got, weight = model.get_submodule(path).weight, plain.get_submodule(path).weight
        assert (got - weight).norm() < 0.03 * weight.norm(), path
    assert (logits(model, full_batch()) - due).norm() < 0.3 * due.norm()


def test_integers_are_those_of_the_smoothed_weight() -> None:
    model, plain = patched("llama"), CAUSAL["llama"].make()
    for path, module in model.named_modules():
        if isinstance(module, W8A8Linear):
            weight = plain.get_submodule(path).weight.detach()
            weight = weight if module.factors is None else weight * module.factors
            weight = weight if module.divisors is None else weight / module.divisors[:, None]
            q, scale = int8.quantize(weight)
            held = module.canonical()
            assert held.w.equal(q), path
            assert held.scale.equal(scale), path


def test_dead_channels_give_finite_numbers() -> None:
    model: Any = CAUSAL["llama"].make()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[5] = 0
        model.model.layers[1].self_attn.v_proj.weight[3] = 0
        model.model.layers[1].mlp.down_proj.weight[:, 7] = 0
    before = snapshot(model)
    accelpatch.patch(model, "smoothquant", statistics=calibrated(model))
    assert model.accelpatch.report().verification.failures == []
    layers = model.model.layers
    assert layers[0].self_attn.q_proj.factors[5] == 1
    assert layers[1].mlp.up_proj.divisors[7] == 1
    assert bool(logits(model, full_batch()).isfinite().all())
    accelpatch.unpatch(model)
    assert snapshot(model) == before


STATIC = parse(
    "name: static\nextends: smoothquant\ncalibrate: {alpha: null}\nverify: {bound: 9}\n"
    "rules:\n  - name: linear\n    options: {activations: auto}\n"
)


@pytest.mark.parametrize("outlier", [False, True], ids=["gaussian", "massive-outlier"])
def test_auto_is_static_where_one_scale_holds(outlier: bool) -> None:
    """A channel of one norm is far larger than all others: for its readers one scale a token is kept."""
    model: Any = CAUSAL["llama"].make()
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.fill_(1)
        norm.weight[3] = 2000 if outlier else 1
    accelpatch.patch(model, STATIC, statistics=calibrated(model), verify=False)
    layer, kernels = model.model.layers[0], {s.path: s.kernel for s in model.accelpatch.report().sites}
    for name in ("q_proj", "k_proj", "v_proj"):
        module = getattr(layer.self_attn, name)
        given = module.canonical().input_scale
        assert (given is None) == outlier
        kind = "dynamic" if outlier else "static"
        assert kernels[f"model.layers.0.self_attn.{name}"].endswith(f", {kind}")
        if not outlier:
            assert given.shape == (1,)
            assert given.dtype == torch.float32
    assert ", static" in str(model.accelpatch.report())


@pytest.mark.parametrize("value, words", [
    pytest.param("[dynamic]", "activations", id="a-list"), pytest.param("sometimes", "is one of dynamic", id="unknown"),
])  # fmt: skip
def test_options_that_are_unknown(value: str, words: str) -> None:
    recipe = f"name: r\nextends: smoothquant\nrules:\n  - name: linear\n    options: {{activations: {value}}}\n"
    with pytest.raises(accelpatch.errors.AccelpatchError, match=words):
        accelpatch.plan(CAUSAL["llama"].make(), parse(recipe))


def test_a_plain_linear_layer_without_statistics_is_refused_a_static_scale() -> None:
    """Of a model of no family nothing is smoothed, and a static scale still needs statistics: its own text."""
    model: nn.Module = CAUSAL["gptj"].make()
    accelpatch.patch(model, "smoothquant-static", verify=False)
    assert any("tokens that the model wrote itself" in note for note in model.accelpatch.report().notes)
    assert model.accelpatch.plan.groups == ()
