"""What hangs on a model's modules goes on working: hidden-state capture, users' hooks, accelerate's hooks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from torch import Tensor, nn

import accelpatch
from tests.support.simulated import logits, simulated
from tests.support.tiny import CAUSAL, LAYERS, full_batch, padded_batch, snapshot

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # two orders of float32 rounding through two layers
recorded = pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", id="llama", marks=pytest.mark.smoke),
        *("gemma2", "gemma3", "qwen3", "phi3", "opt", "gpt2", "mixtral", "bloom", "cohere"),
    ],
)


@recorded
def test_hidden_states_and_attentions(name: str) -> None:
    model = CAUSAL[name].make(attn_implementation="eager")
    plain = simulated(model, accelpatch.plan(model, "int8"), torch.float32)
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad(), accelpatch.patched(model, "int8"):
        output = model(**full_batch(), **options)
    with torch.no_grad():
        expected = plain(**full_batch(), **options)
    assert len(output.hidden_states) == len(expected.hidden_states) == LAYERS + 1
    assert len(output.attentions) == len(expected.attentions) == LAYERS
    for got, due in zip(
        output.hidden_states + output.attentions, expected.hidden_states + expected.attentions, strict=True
    ):
        torch.testing.assert_close(got, due, **CLOSE)


@pytest.mark.parametrize("first", ["before", "during", "after"])
def test_hidden_states_asked_for_before_during_and_after(first: str) -> None:
    """transformers hangs its hooks on the layers at the first such call and never again."""
    model = CAUSAL["llama"].make()
    expected = CAUSAL["llama"].make()(**full_batch(), output_hidden_states=True).hidden_states
    moments = ["before", "during", "after"]
    for moment in moments:
        if moment == "during":
            accelpatch.patch(model, "exact")
        elif moment == "after":
            accelpatch.unpatch(model)
        if moments.index(moment) >= moments.index(first):
            got = model(**full_batch(), output_hidden_states=True).hidden_states
            torch.testing.assert_close(got, expected, **CLOSE)


SITES = {
    "linear": "model.layers.0.self_attn.q_proj", "mlp": "model.layers.1.mlp", "layer": "model.layers.0",
    "norm": "model.layers.1.post_attention_layernorm", "input-norm": "model.layers.0.input_layernorm",
    "head": "lm_head", "embedding": "model.embed_tokens", "rotary": "model.rotary_emb", "model": "",
}  # fmt: skip
sites = pytest.mark.parametrize("path", [pytest.param(path, id=name) for name, path in SITES.items()])


def call(model: nn.Module) -> Tensor:
    return logits(model, padded_batch())


class Seen:
    """Hooks of every kind on one module; `events` lists what ran and with what."""

    def __init__(self, module: nn.Module):
        self.events: list[tuple[str, type[nn.Module]]] = []
        self.handles = [
            module.register_forward_pre_hook(lambda m, args: self.note("before", m)),
            module.register_forward_pre_hook(lambda m, args, kwargs: self.note("before-kwargs", m), with_kwargs=True),
            module.register_forward_hook(lambda m, args, output: self.note("after", m)),
            module.register_forward_hook(
                lambda m, args, kwargs, output: self.note("after-kwargs", m), with_kwargs=True
            ),
        ]

    def note(self, event: str, module: nn.Module) -> None:
        self.events.append((event, type(module)))

    def taken(self) -> list[str]:
        events, self.events = [event for event, _ in self.events], []
        return events


ALL = ["before", "before-kwargs", "after", "after-kwargs"]


@sites
def test_hooks_registered_before_a_patch_live_through_it(path: str) -> None:
    model = CAUSAL["mistral"].make()
    seen = Seen(model.get_submodule(path))
    accelpatch.patch(model, "int8")
    seen.taken()
    call(model)
    assert seen.taken() == ALL
    accelpatch.unpatch(model)
    call(model)
    assert seen.taken() == ALL
    for handle in seen.handles:
        handle.remove()
    call(model)
    assert seen.taken() == []


@sites
def test_hooks_removed_by_their_handles_while_patched_stay_away(path: str) -> None:
    model = CAUSAL["mistral"].make()
    before = snapshot(model)
    seen = Seen(model.get_submodule(path))
    accelpatch.patch(model, "int8")
    for handle in seen.handles:
        handle.remove()
    seen.taken()
    call(model)
    accelpatch.unpatch(model)
    call(model)
    assert seen.taken() == []
    assert snapshot(model) == before


@sites
def test_hooks_registered_on_a_patched_model(path: str) -> None:
    model = CAUSAL["mistral"].make()
    before = snapshot(model)
    accelpatch.patch(model, "int8")
    seen = Seen(model.get_submodule(path))
    call(model)
    assert seen.taken() == ALL
    accelpatch.unpatch(model)
    call(model)
    assert seen.taken() == ALL
    for handle in seen.handles:
        handle.remove()
    call(model)
    assert seen.taken() == []
    assert snapshot(model) == before


@pytest.mark.parametrize("recipe", ["exact", "int8"])
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=name) for name, path in SITES.items() if name not in ("rotary", "model")]
)
def test_a_hook_that_changes_the_output_changes_it_once(path: str, recipe: str) -> None:
    """Also where its module's work is done inside a fused neighbour: the norm after a residual addition."""
    model = CAUSAL["mistral"].make()
    plain = simulated(model, accelpatch.plan(model, recipe), torch.float32)
    for one in (model, plain):
        one.get_submodule(path).register_forward_hook(lambda module, args, output: output * 1.25)
    accelpatch.patch(model, recipe)
    torch.testing.assert_close(call(model), call(plain), **CLOSE)


FUSED = {name: SITES[name] for name in ("linear", "mlp", "norm", "input-norm")}
PLACES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def dispatched(name: str = "mistral") -> nn.Module:
    """A model with a hook of accelerate on every module, as a device_map over several devices leaves it."""
    model = CAUSAL[name].make()
    dispatch_model(model, device_map=dict.fromkeys(PLACES, "cpu"), force_hooks=True)
    hooked = {path for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert {"", "model.layers.0", "model.layers.1.mlp.up_proj", "model.norm", "lm_head"} <= hooked
    return model


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_accelerate_hooks_on_every_module(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["mistral"].make()
    plain = simulated(model, accelpatch.plan(model, recipe), torch.float32)
    model = dispatched()
    before = snapshot(model)
    accelpatch.patch(model, recipe)
    assert model.accelpatch.report().verification.failures == []
    assert model.accelpatch.report().replaced == len(accelpatch.plan(plain, recipe).replaced)
    runs: Counter[str] = Counter()
    pre_forward = AlignDevicesHook.pre_forward

    def counting(self: AlignDevicesHook, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runs[type(module).__name__] += 1
        return pre_forward(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counting)
    torch.testing.assert_close(call(model), call(plain), **CLOSE)
    assert runs["ResidualNormLayer_MistralDecoderLayer"] == LAYERS
    assert runs["FusedRMSNorm_MistralRMSNorm"] == 2 * LAYERS + 1  # the norm after the addition is called as itself
    if recipe != "exact":
        assert runs[type(model.model.layers[0].mlp.up_proj).__name__] == 7 * LAYERS + (recipe == "int8")
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_accelerate_hooks_taken_off_before_a_patch() -> None:
    """accelerate then leaves the class's own forward on each instance."""
    model = remove_hook_from_module(dispatched(), recurse=True)
    assert "forward" in vars(model.lm_head)
    before = snapshot(model)
    plain = simulated(CAUSAL["mistral"].make(), accelpatch.plan(model, "int8"), torch.float32)
    accelpatch.patch(model, "int8")
    assert model.accelpatch.report().replaced == len(accelpatch.plan(CAUSAL["mistral"].make(), "int8").replaced)
    torch.testing.assert_close(call(model), call(plain), **CLOSE)
    accelpatch.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("path", [pytest.param(path, id=name) for name, path in FUSED.items()])
def test_a_forward_of_the_users_own_is_used(path: str) -> None:
    model = CAUSAL["mistral"].make()
    module = model.get_submodule(path)
    module.forward = lambda x: 0.5 * type(module).forward(module, x)
    expected = call(model)
    with accelpatch.patched(model, "int8"):
        assert model.get_submodule(path) is module
        assert (call(model) - expected).abs().max() < 0.5
    with accelpatch.patched(model, "exact"):
        torch.testing.assert_close(call(model), expected, **CLOSE)


def test_a_forward_of_the_users_own_is_a_reason_to_stay() -> None:
    model = CAUSAL["mistral"].make()
    up = model.model.layers[0].mlp.up_proj
    up.forward = lambda x: torch.zeros(*x.shape[:-1], up.out_features)
    report = accelpatch.plan(model, "int8").report()
    reasons = {site.path: site.reason for site in report.sites if site.path.startswith("model.layers.0.mlp.")}
    assert (
        reasons["model.layers.0.mlp.up_proj"] == "model.layers.0.mlp.up_proj has a forward of its own on the instance"
    )
    assert reasons["model.layers.0.mlp.down_proj"] is None
