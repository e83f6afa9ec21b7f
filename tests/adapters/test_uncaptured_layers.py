"""Training with gradient checkpointing where torch's checkpoint runs, not captured layers, and the report says why."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.runtime.graphs.captured_layer import CapturedLayer
from accelpatch.runtime.graphs.training_layers import CAPTURED
from tests.support.captured_layers import IDS, Found, backward, both, graphs, paths, replays, same, trained
from tests.support.steps import inner
from tests.support.tiny import LAYERS

__all__ = ["graphs", "replays"]


@pytest.mark.parametrize("change, why", [
    ({"lora_dropout": 0.1}, "p = 0.1 in Dropout"),
    ({"modules_to_save": ["input_layernorm"]}, "a parameter outside of adapters trains"),
])  # fmt: skip
def test_what_is_not_captured(change: Found, why: str, graphs: None, replays: list[str]) -> None:
    model = trained("int8", **change)
    for _ in range(4):
        backward(model, IDS[0])
    assert not replays
    assert any(why in path for path in paths(model)), paths(model)


def test_a_hook_and_autocast_step_aside(graphs: None, replays: list[str]) -> None:
    model, seen = trained("int8"), list[Any]()
    for _ in range(3):
        backward(model, IDS[0])
    replays.clear()
    module = inner(model).model.layers[0].mlp
    for register in (module.register_forward_hook, module.register_full_backward_hook):
        handle = register(lambda *_: seen.append(None))
        backward(model, IDS[0])
        handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(model, IDS[0])
    assert len(seen) == 2
    assert not replays
    assert {path.partition(": ")[2] for path in paths(model)} >= {"a hook in a layer", "autocast"}
    for _ in range(3):  # torch marks a module that had such a hook, which is a change
        backward(model, IDS[0])
    assert replays == ["forward"] * LAYERS + ["backward"] * LAYERS


def test_hidden_states_are_those_of_every_layer(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        made = [model(input_ids=IDS[0], output_hidden_states=True).hidden_states for _ in range(4)]
        return [one.detach() for one in made[-1]]

    same(*both(run, trained, monkeypatch))


def test_random_layers_and_errors_are_found_at_the_capture(
    graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never tried again."""
    model, tried = trained("int8"), list[Any]()
    stock = CapturedLayer.capture

    def capturing(self: Any, graph: Any) -> None:
        tried.append(self)
        forward = self._call.function
        object.__setattr__(self._call, "function", lambda *args, **more: forward(*args, **more) + torch.rand(()))
        stock(self, graph)

    monkeypatch.setattr(CapturedLayer, "capture", capturing)
    for _ in range(6):
        backward(model, IDS[0])
    assert len(tried) == LAYERS
    assert not replays
    assert list(paths(model)) == ["no captured training layers: KernelError: random numbers in a layer"]


def test_only_so_many_shapes(graphs: None) -> None:
    model = trained("int8")
    for length in range(4, 10):
        for _ in range(3):
            backward(model, IDS[1][:, :length])
    assert paths(model) == {CAPTURED: 4, "no captured training layers: 4 shapes are captured": 6}


def test_nothing_is_left_outside_of_a_call(graphs: None) -> None:
    """Neither on the layers, nor of the graphs after unpatch."""
    model = trained("int8")
    before = [dict(vars(one)) for one in inner(model).model.layers]
    for _ in range(3):
        backward(model, IDS[0])
    assert [dict(vars(one)) for one in inner(model).model.layers] == before
    assert all(isinstance(one, torch.nn.Parameter) for one in model.parameters())
    layers = weakref.ref(vars(inner(model))["_accelpatch_runtime"].training_layers)
    accelpatch.unpatch(inner(model))
    gc.collect()
    assert layers() is None
    backward(model, IDS[0])
