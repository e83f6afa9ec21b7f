"""A packed linear layer and its LoRA adapter as one node of autograd: what PEFT's own forward computes, or that one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.kernels.ops.linear import low_rank_linear
from accelpatch.modules import adapted_linear
from tests.support.lora import RECIPES, config, peft
from tests.support.packed import patch as patch_to
from tests.support.tiny import CAUSAL, full_batch

IDS = full_batch()["input_ids"]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the node was asked for, call after call."""
    stock, asked = low_rank_linear.low_rank_linear, list[Any]()

    def counted(*args: Any) -> Tensor:
        asked.append(args)
        return stock(*args)

    monkeypatch.setattr(adapted_linear, "low_rank_linear", counted)
    return asked


def trained(recipe: Any, first: bool = False, **changes: Any) -> Any:
    """A PeftModel in training mode, adapted after the patch or (first) before it."""
    model, asked = CAUSAL["llama"].make(num_hidden_layers=1), config(**changes)
    torch.manual_seed(1)
    if first:
        return accelpatch.patch(peft.get_peft_model(model, asked), recipe, verify=False).train()
    return peft.get_peft_model(accelpatch.patch(model, recipe, verify=False), asked).train()


def gradients(model: Any, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, **options).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def stock_gradients(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as changed:
        changed.setattr(adapted_linear, "_only", lambda module: None)
        return gradients(model)


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_every_layer_is_a_node_with_the_gradients_of_pefts(
    recipe: str, first: bool, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(RECIPES[recipe], first)
    found = gradients(model)
    assert len(nodes) == 7, "all linear layers of the one layer"
    due = stock_gradients(model, monkeypatch)
    assert len(nodes) == 7
    assert found.keys() == due.keys()
    for name, one in due.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_gradcheck_in_float64(form: str, nodes: list[Any]) -> None:
    """Of x and both factors, for each format that an input's gradient can go through."""
    torch.manual_seed(0)
    model: Any = patch_to(CAUSAL["llama"].make(num_hidden_layers=1), form)
    wrapped = peft.get_peft_model(model, config(target_modules=["q_proj"])).double().train()
    layer = next(one for one in wrapped.modules() if isinstance(one, adapted_linear.AdaptsLinear))
    held: Any = layer
    x = torch.randn(3, held.in_features, dtype=torch.float64, requires_grad=True)
    down, up = held.lora_A["default"].weight, held.lora_B["default"].weight

    def product(x: Tensor, *_: Tensor) -> Tensor:
        return held(x)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(product, (x, down, up), eps=1e-6, atol=1e-5, rtol=1e-4)
    assert nodes


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_forms_of_lora_run_pefts_forward(changes: dict[str, Any], nodes: list[Any]) -> None:
    assert gradients(trained("int8", **changes))
    assert not nodes


def test_hooks_and_second_adapters_run_pefts_forward(nodes: list[Any]) -> None:
    model = trained("int8")
    seen: list[Any] = []
    layers = [one for one in model.modules() if isinstance(one, adapted_linear.AdaptsLinear)]
    for one in layers[:2]:  # in the adapter, and on the layer inside
        inside: Any = one
        (inside.lora_A["default"] if one is layers[0] else inside.base_layer).register_forward_hook(
            lambda *_: seen.append(1)
        )
    gradients(model)
    assert (len(nodes), len(seen)) == (5, 2)
    nodes.clear()
    model.add_adapter("second", config(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    gradients(model)
    assert len(nodes) == 7 - 2  # q_proj has two adapters, and is the first that is watched
    nodes.clear()
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=IDS)
    assert not nodes


def test_an_unpatched_model_runs_pefts_forward(nodes: list[Any]) -> None:
    model = trained("int8")
    accelpatch.unpatch(model)
    assert gradients(model)
    assert not nodes


def test_copies_and_pickles_have_pefts_class() -> None:
    model = trained("int8")
    layer = next(one for one in model.modules() if isinstance(one, adapted_linear.AdaptsLinear))
    for made in (copy.deepcopy(layer.lora_A), pickle.loads(pickle.dumps(layer.lora_A))):  # type: ignore[attr-defined]
        assert isinstance(made, nn.ModuleDict)
    assert type(copy.deepcopy(layer)).__mro__[0].__module__ == "peft.tuners.lora.layer"
    assert not isinstance(copy.copy(layer), adapted_linear.AdaptsLinear)


def test_what_the_node_does_not_take() -> None:
    weight = trained("int8").base_model.model.model.layers[0].mlp.down_proj.base_layer.layout
    x = torch.zeros(1, weight.k)
    assert low_rank_linear.why_not(weight, x, None) is None
    assert "none of torch's own" in str(low_rank_linear.why_not(weight, x.to("meta")))


def test_16_bits_on_a_cpu_run_pefts_forward(nodes: list[Any]) -> None:
    assert gradients(trained("int8").to(torch.bfloat16))
    assert not nodes


def test_the_node_in_bfloat16() -> None:
    """Each result within some roundings of float64 arithmetic on the same numbers."""
    torch.manual_seed(0)
    weight = trained("int8").base_model.model.model.layers[0].mlp.down_proj.base_layer.layout
    x, down, up = torch.randn(5, weight.k), torch.randn(4, weight.k) / 8, torch.randn(weight.n, 4) / 2
    dy = torch.randn(5, weight.n).bfloat16()
    found: list[list[Tensor]] = []
    for dtype in (torch.bfloat16, torch.float64):
        own = [one.bfloat16().to(dtype).requires_grad_() for one in (x, down, up)]
        y = low_rank_linear.low_rank_linear(own[0], weight, None, own[1], own[2], 1.5)
        found.append([y.detach(), *torch.autograd.grad(y, own, dy.to(dtype))])
    for one, due in zip(*found, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - due).norm()) < 0.01 * float(due.norm())


@pytest.mark.parametrize("factor", [0, 1], ids=["down", "up"])
def test_second_derivatives_where_no_gradient_goes_through_the_weight(factor: int, nodes: list[Any]) -> None:
    """As of the last layer of a model: they go through what the node keeps of its arguments."""
    torch.manual_seed(0)
    model: Any = patch_to(CAUSAL["llama"].make(num_hidden_layers=1), "int8")
    wrapped = peft.get_peft_model(model, config(target_modules=["q_proj"])).train()
    layer: Any = next(one for one in wrapped.modules() if isinstance(one, adapted_linear.AdaptsLinear))
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    nn.init.normal_(factors[1])
    x = torch.randn(3, layer.in_features)

    def second() -> list[Tensor]:
        made = torch.autograd.grad(layer(x).tanh().sum(), factors, create_graph=True)
        return list(torch.autograd.grad(made[factor].pow(2).sum(), factors))

    found = second()
    assert nodes
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(adapted_linear, "_only", lambda module: None)
        due = second()
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
