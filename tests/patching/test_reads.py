"""A packed weight is unpacked when its numbers are asked for, and has the values of the time when it was read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.packed import packed

PATH = "model.layers.1.mlp.down_proj"


def test_a_weight_is_unpacked_when_it_is_computed_with_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's MLP asks for the dtype of a weight at every call."""
    model = packed()
    layer, unpacked = model.get_submodule(PATH), list[Any]()
    own = type(layer).dequantized

    def dequantized(self: Any) -> Tensor:
        unpacked.append(self)
        made: Tensor = own(self)
        return made

    monkeypatch.setattr(type(layer), "dequantized", dequantized)
    weight: Any = layer.weight
    assert (weight.dtype, tuple(weight.shape), weight.device.type) == (torch.float32, (64, 96), "cpu")
    assert isinstance(weight, Tensor)
    assert not unpacked
    due = own(layer)
    assert torch.equal(weight + 0, due)
    assert torch.equal(weight.t()[3], due.t()[3])
    assert len(unpacked) == 1


def test_a_view_that_was_not_computed_with_keeps_the_values_of_its_time() -> None:
    model = packed()
    layer: Any = model.get_submodule(PATH)
    due, weight = layer.dequantized(), layer.weight
    state = {name: one.clone() for name, one in model.state_dict().items()}
    state[f"{PATH}.q"] = -state[f"{PATH}.q"]
    model.load_state_dict(state)
    assert torch.equal(copy.deepcopy(weight), due)
    assert torch.equal(layer.weight + 0, -due)
