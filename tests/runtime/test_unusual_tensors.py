"""Weights that are no plain tensors (torchao's classes, sparse ones): their modules run, and the rest stays fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import accelpatch
from accelpatch.own_code import unusual
from tests.support.other_code import assert_alike, steps
from tests.support.tiny import CAUSAL, full_batch


class Codes(Tensor):
    """A weight as int8 codes and a scale a row, as torchao's: it has no numbers of its own in memory."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            weight = args[1]
            return functional.linear(args[0], weight.codes.float() * weight.scale, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(str(function))


class Louder(nn.Parameter):
    """A parameter with numbers, of which torch's functions make twice as much."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        return 2 * made if function is functional.linear else made


def _codes(weight: Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return nn.Parameter(Codes((weight / scale).round().to(torch.int8), scale), requires_grad=False)


KINDS: dict[str, Callable[[Tensor], nn.Parameter]] = {
    "codes": _codes,
    "a parameter that computes": Louder,
    "sparse": lambda weight: nn.Parameter(weight.to_sparse_csr(), requires_grad=False),
    "negated": lambda weight: nn.Parameter(torch._neg_view(weight), requires_grad=False),
}
PLACES: dict[str, Callable[[Any], list[Any]]] = {
    "down": lambda model: [model.model.layers[1].mlp.down_proj],
    "attention and MLP": lambda model: [
        one for layer in model.model.layers for one in (layer.self_attn.q_proj, layer.mlp.gate_proj)
    ],
    "head": lambda model: [model.lm_head],
}


def _give(model: Any, kind: str, place: str) -> None:
    for module in PLACES[place](model):
        module.weight = KINDS[kind](module.weight.detach())


@pytest.mark.each_value
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_run_for_weights_that_kernels_cannot_read(kind: str, place: str, after: bool, machine: str) -> None:
    if (kind, place) == ("sparse", "head"):
        pytest.skip("torch has no product of one row and such a weight")
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    _give(plain, kind, place)
    if not after:
        _give(model, kind, place)
    accelpatch.patch(model, "exact", verify=False)
    if after:
        assert_alike(model, CAUSAL["llama"].make(), full_batch())
        _give(model, kind, place)
    steps(model)
    assert_alike(model, plain, full_batch())
    if place == "down":  # layer 0 goes on
        assert any("modules in layers [1]" in name for name in model.accelpatch.report().paths)
    accelpatch.unpatch(model)
    assert_alike(model, plain, full_batch())


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["int8", "smoothquant", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_such_weights_are_not_quantised(kind: str, recipe: str) -> None:
    model = CAUSAL["llama"].make()
    _give(model, kind, "down")
    module = model.model.layers[1].mlp.down_proj
    accelpatch.patch(model, recipe, verify=False)
    assert type(model.model.layers[1].mlp.down_proj) is type(module)
    assert model.model.layers[1].mlp.down_proj.weight is module.weight


def test_what_is_a_plain_tensor() -> None:
    plain = [torch.ones(2, 2), nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2).t(), torch.ones(2, 2, device="meta")]
    assert [unusual(one) for one in plain] == [None] * 4
    assert "layout torch.sparse_coo" in str(unusual(torch.ones(2, 2).to_sparse()))
    assert "Codes" in str(unusual(_codes(torch.ones(2, 2))))
