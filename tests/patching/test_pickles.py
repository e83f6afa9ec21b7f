"""A patched model is not pickled, and says so; copies of it are made as ever."""

from __future__ import annotations

import abc
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, padded_batch


def call(model: nn.Module) -> torch.Tensor:
    return logits(model, padded_batch())


@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_patched_model_is_not_pickled(save: Any) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8")
    assert call(copy.copy(model)).equal(call(model))
    with pytest.raises(PatchError, match=r"cannot be pickled .* accelpatch\.unpatch\(model\)"):
        save(model, io.BytesIO())
    accelpatch.unpatch(model)
    save(model, kept := io.BytesIO())
    kept.seek(0)
    again = torch.load(kept, weights_only=False) if save is torch.save else pickle.load(kept)
    assert call(again).equal(call(model))


@pytest.mark.parametrize("path", ["model", "model.layers.0", "model.layers.1.mlp", "lm_head", "model.norm"])
@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_nor_is_a_part_of_one(save: Any, path: str) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", verify=False)
    part, kinds = model.get_submodule(path), "LlamaModel|LlamaDecoderLayer|LlamaMLP|Linear|LlamaRMSNorm"
    with pytest.raises(PatchError, match=rf"a patched ({kinds}) cannot be pickled .* accelpatch\.unpatch\(model\)"):
        save(part, io.BytesIO())
    with pytest.raises(PatchError, match="cannot be pickled"):
        save({"among": [part]}, io.BytesIO())
    assert call(copy.copy(model)).equal(call(model))
    state = io.BytesIO()
    save(part.state_dict(), state)
    accelpatch.unpatch(model)
    save(model.get_submodule(path), io.BytesIO())


def test_a_stock_part_around_replacements_says_so_too() -> None:
    """Attention itself is not replaced; its projections are."""
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", verify=False)
    with pytest.raises(PatchError, match="a patched Linear cannot be pickled"):
        pickle.dumps(model.model.layers[0].self_attn)


class Abstract(nn.Module, abc.ABC):
    """A model whose class is of a kind of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_model_whose_class_has_a_metaclass() -> None:
    model = Abstract().eval()
    accelpatch.patch(model, "int8", verify=False)
    assert isinstance(model, Abstract)
    assert type(copy.deepcopy(model)) is type(model)
    with pytest.raises(PatchError, match="a patched Abstract cannot be pickled"):
        pickle.dumps(model)
    accelpatch.unpatch(model)
    assert type(model) is Abstract
