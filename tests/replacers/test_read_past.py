"""Modules that a fused replacement does the work of: their hooks fire, another module in their place is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.simulated import simulated
from tests.support.spread import spread
from tests.support.steps import logits as steps
from tests.support.steps import stock
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, full_batch, padded_batch

RECIPES = ("exact", "int8", "int4")
NEW = 6
recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(params=["cpu", "gpu"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native step of a CPU, or the captured one of a GPU, for which a CPU stands."""
    if request.param == "gpu":
        monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
        monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
        with_tiles(monkeypatch)
    return str(request.param)


class Doubled(nn.Module):
    """Another activation, or another norm."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inside(x)


def swap(owner: Any, name: str) -> None:
    setattr(owner, name, Doubled(getattr(owner, name)))


def other_eps(layer: Any) -> None:
    layer.post_attention_layernorm = LlamaRMSNorm(64, eps=5.0)


def own_forward(module: Any) -> None:
    forward = type(module).forward
    module.forward = lambda *args, **kwargs: forward(module, *args, **kwargs) * 0.5


def own_attention(attention: Any) -> None:
    forward = type(attention).forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, *rest = forward(attention, *args, **kwargs)
        return (0.5 * out, *rest)

    attention.forward = halved


# What a user does to a layer -> a model that it was done to computes something else.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "activation": lambda layer: swap(layer.mlp, "act_fn"),
    "another-activation": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "activation-hook": lambda layer: layer.mlp.act_fn.register_forward_hook(lambda m, args, out: out * 3),
    "activation-pre-hook": lambda layer: layer.mlp.act_fn.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "activation-forward": lambda layer: own_forward(layer.mlp.act_fn),
    "norm": lambda layer: swap(layer, "post_attention_layernorm"),
    "first-norm": lambda layer: swap(layer, "input_layernorm"),
    "stock-norm": other_eps,
    "mlp": lambda layer: swap(layer, "mlp"),
    "projection": lambda layer: swap(layer.mlp, "up_proj"),
    "attention-forward": lambda layer: own_attention(layer.self_attn),
    "scaling": lambda layer: setattr(layer.self_attn, "scaling", 0.9),
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 3.0),
}


@pytest.mark.each_value
@spread("change, moment, recipe", [*CHANGES], ["before", "after"], RECIPES)
def test_a_change_inside_a_layer_is_used(recipe: str, change: str, moment: str, machine: str) -> None:
    """In prompts and in steps, whether it came before the first generate() or after."""
    model = CAUSAL["llama"].make()
    plain = simulated(model, accelpatch.plan(model, recipe), torch.float32)
    accelpatch.patch(model, recipe, verify=False)
    unchanged = steps(model, full_batch(), NEW) if moment == "after" else steps(stock(model), full_batch(), NEW)
    for one in (model, plain):
        for layer in one.model.layers:
            CHANGES[change](layer)
    found, due = steps(model, full_batch(), NEW), steps(plain, full_batch(), NEW)
    assert (unchanged - due).norm() / due.norm() > 0.05, "the change changes nothing"
    torch.testing.assert_close(found, due, rtol=1e-3, atol=1e-3)


@recipes
def test_a_hook_on_an_activation_is_called_once_a_call(recipe: str, machine: str) -> None:
    model, seen = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    with torch.no_grad():
        model(**padded_batch(), use_cache=False)
    assert seen == [(3, 9, 96)] * 2
    seen.clear()
    model.generate(**full_batch(), max_new_tokens=4, do_sample=False)
    assert seen == [(3, 9, 96)] * 2 + [(3, 1, 96)] * 6


def test_a_backward_hook_on_an_activation() -> None:
    model, seen = CAUSAL["llama"].make(), []
    accelpatch.patch(model, "exact", verify=False)
    act = model.model.layers[1].mlp.act_fn
    act.register_full_backward_hook(lambda module, grads, outs: seen.append(1))
    hidden = torch.randn(2, 3, 64, requires_grad=True)
    model.model.layers[1].mlp(hidden).sum().backward()
    assert seen == [1]


def test_a_hook_on_all_modules_sees_the_activation() -> None:
    model, seen = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False), []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    try:
        with torch.no_grad():
            model(**full_batch(), use_cache=False)
    finally:
        handle.remove()
    assert seen.count(type(model.model.layers[0].mlp.act_fn).__name__) == 2
    assert sum("RMSNorm" in name for name in seen) == 5


@pytest.mark.parametrize("change", ["hook", "dropout", "swapped"])
def test_children_of_a_layer_that_do_nothing(change: str) -> None:
    """Phi-3's dropouts, which drop nothing as they come."""
    model, plain, seen = CAUSAL["phi3"].make(), CAUSAL["phi3"].make(), []
    accelpatch.patch(model, "exact", verify=False)
    assert type(model.model.layers[0]).__name__ == "ResidualNormLayer_Phi3DecoderLayer"
    for one in (model, plain):
        dropout = one.model.layers[0].resid_mlp_dropout
        if change == "hook":
            dropout.register_forward_hook(lambda module, args, out: seen.append(1) or out * 2)
        elif change == "dropout":
            dropout.p = 1.0
            dropout.train()
        else:
            swap(one.model.layers[0], "resid_mlp_dropout")
    found, due = steps(model, full_batch(), NEW), steps(plain, full_batch(), NEW)
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    assert change != "hook" or len(seen) == 2 * NEW


SOFTCAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-scores": ("gemma3", {"attn_logit_softcapping": 0.5}),
    "gemma3-logits": ("gemma3", {"final_logit_softcapping": 2.0}),
    "gemma3-both": ("gemma3", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma2-eager": ("gemma2", {"attn_logit_softcapping": 0.5, "attn_implementation": "eager"}),
    "gemma2-none": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-logits": ("gemma2", {"final_logit_softcapping": 1.0, "attn_implementation": "eager"}),
    "gemma3-scaled": ("gemma3", {"query_pre_attn_scalar": 3}),
    "llama-foreign": ("llama", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}),
    "qwen3-foreign": ("qwen3", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}),
    "mistral-window": ("mistral", {"sliding_window": 3}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "gemma3-both-ways": ("gemma3", {"use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("case", SOFTCAPS)
def test_facts_of_a_family_are_those_of_transformers(case: str, machine: str) -> None:
    """What a family ignores is ignored in steps too; what it does is done."""
    name, config = SOFTCAPS[case]
    model, plain = CAUSAL[name].make(**config), CAUSAL[name].make(**config)
    accelpatch.patch(model, "exact", verify=False)
    found, due = steps(model, full_batch(), NEW), steps(plain, full_batch(), NEW)
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
