"""Fused decoder layers of encoder-decoders in captured steps: stock generate()'s tokens, and proof that they ran.

No GPU is needed: the CPU is put into the table of graphs, and taken for a device with steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.fusion import cross_replacer
from accelpatch.fusion.cross_layer import FusedCross
from accelpatch.fusion.verified_cross import cross_layers
from accelpatch.models.encoder_decoders import FORMS
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from tests.support.encoder_decoders import FAMILIES, StrictGraph, encoder_decoder, given_to

LAYERS, NEW = 2, 32
WAYS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 3}}
UNFUSED = ("umt5",)


@pytest.fixture(autouse=True)
def _steps_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(cross_replacer, "WITHOUT_STEPS", ())


def model_of(name: str, **changes: Any) -> Any:
    model = encoder_decoder(name, eos_token_id=None, **changes)
    torch.manual_seed(3)
    for path, parameter in model.named_parameters():  # biases and norms that do something
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("weight" in path), std=0.1)
    return model


def patched(model: Any, recipe: str = "exact") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelpatch.patch(model, recipe)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Context manager: counts calls that run fused."""
    found, own = [0], FusedCross.__call__

    def count(self: FusedCross, *args: Any) -> Tensor:
        found[0] += 1
        return own(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedCross, "__call__", count)
        yield found


def stock(model: Any) -> Any:
    """A copy of the patched model that runs transformers' own loop."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def test_every_class_of_the_table_has_a_model_here() -> None:
    here = {type(module).__name__ for name in FAMILIES for module in encoder_decoder(name).modules()}
    copies = {"PLBartDecoderLayer", "BlenderbotSmallDecoderLayer", "Speech2TextDecoderLayer"}
    assert FORMS.keys() - here <= copies


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNFUSED])
def test_tokens_of_every_family(name: str) -> None:
    model, given = model_of(name), given_to(name)
    due = {way: model.generate(**given, **options, max_new_tokens=NEW) for way, options in WAYS.items()}
    state = {key: one.clone() for key, one in model.state_dict().items()}
    patched(model)
    report = model.accelpatch.report()
    assert f"{LAYERS} of {LAYERS} layers fused" in str(report)
    assert report.verification.fused_layers == LAYERS
    for way, options in WAYS.items():
        with counted() as calls:
            made = model.generate(**given, **options, max_new_tokens=NEW)
        assert torch.equal(made, due[way])
        assert calls[0] >= LAYERS * (NEW - 1)
    assert not [path for path in model.accelpatch.report().paths if path.startswith("stock loop")]
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    accelpatch.unpatch(model)
    assert not cross_layers(model)
    assert torch.equal(model.generate(**given, do_sample=False, max_new_tokens=NEW), due["greedy"])
