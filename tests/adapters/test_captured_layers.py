"""Training with gradient checkpointing by captured layers: the numbers of torch's checkpoint, bit for bit, and where a
graph would be wrong torch's checkpoint itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.training_layers import CAPTURED
from tests.support.captured_layers import IDS, backward, both, graphs, paths, replays, same, steps, trained
from tests.support.refusing import RefusingGraph
from tests.support.tiny import LAYERS, padded_batch

__all__ = ["graphs", "replays"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
@pytest.mark.parametrize("recipe", ["int8", "int4", "train"])
def test_steps_are_those_of_checkpoint(
    recipe: str, reentrant: bool, graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shapes in turn, accumulated; the third call of each is captured."""
    model: list[Any] = []

    def make() -> Any:
        model.append(trained(recipe, reentrant))
        return model[-1]

    same(*both(lambda one: steps(one, 5), make, monkeypatch))
    assert paths(model[0]) == {CAPTURED: 6}
    assert replays.count("forward") == replays.count("backward") == 6 * LAYERS


@pytest.mark.parametrize("recipe", ["int8", "int4", "train"])
def test_a_capture_allows_what_a_layer_does(
    recipe: str, graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near, not equal: packed layers are not one node with their adapters while operations are observed."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", RefusingGraph)
    ours, due = both(lambda one: [backward(one, IDS[0]) for _ in range(4)], lambda: trained(recipe), monkeypatch)
    assert replays.count("backward") == 2 * LAYERS
    for one, other in zip(ours[-1], due[-1], strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


@pytest.mark.parametrize("name", ["gemma2", "qwen2", "phi3"])
def test_other_families(name: str, graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(lambda one: steps(one, 4), lambda: trained("int8", name=name), monkeypatch))
    assert replays


def test_a_padded_batch_after_another(graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are arguments, and each call has its own."""
    batch = padded_batch()
    masks = [batch["attention_mask"], batch["attention_mask"].flip(0)]

    def run(model: Any) -> list[Tensor]:
        found = []
        for place in range(6):
            found += backward(model, batch["input_ids"], attention_mask=masks[place % 2])
        return found

    same(*both(run, trained, monkeypatch))
    assert replays.count("backward") >= 4


def _generated(model: Any, step: int) -> Any:
    model.eval()
    made = model.generate(input_ids=IDS[0][:1], max_new_tokens=3, do_sample=False)
    model.train()
    return made


def _alone(model: Any, step: int) -> Any:
    """Without adapters, as in a loss that compares the two."""
    with model.disable_adapter(), torch.no_grad():
        return model(input_ids=IDS[0]).logits.detach()


def _frozen(model: Any, step: int) -> None:
    """Another part trains from here on."""
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.requires_grad_((".layers.0." not in name) if step < 3 else "q_proj" in name)


def _moved(model: Any, step: int) -> None:
    for name, one in model.named_parameters():
        if "lora_B" in name and step == 3:
            one.data = one.data * 0.5


def _merged(model: Any, step: int) -> None:
    if step == 3:
        model.base_model.model.model.layers[0].mlp.down_proj.scaling["default"] = 0.3


@pytest.mark.parametrize("between", [_generated, _alone, _frozen, _moved, _merged])
def test_changes_between_steps(between: Any, graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(lambda one: steps(one, 7, between), lambda: trained("int8"), monkeypatch))
    assert "backward" in replays


def test_a_model_that_changes_at_every_call(graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at so often and no more."""
    made: list[Any] = []

    def other(model: Any, step: int) -> Any:
        made.append(model)
        with model.disable_adapter():
            return model(input_ids=IDS[0]).logits.detach()

    same(*both(lambda one: steps(one, 5, other), lambda: trained("int8"), monkeypatch))
    assert not replays
    assert list(paths(made[0])) == ["no captured training layers: the model changes at every call"]


def test_a_layer_that_is_frozen_passes_gradients_on(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        model = trained("int8")
        for name, one in model.named_parameters():
            if f".layers.{LAYERS - 1}." in name:
                one.requires_grad_(False)
        return model

    ours, due = both(lambda one: steps(one, 4), make, monkeypatch)
    same(ours, due)


def test_a_parameter_that_moves_between_forward_and_backward(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        for _ in range(3):
            found = backward(model, IDS[0])
        loss = model(input_ids=IDS[0], labels=IDS[0]).loss
        for name, one in model.named_parameters():
            if "lora_A" in name:
                one.data = one.data * 2
        loss.backward()
        return [*found, *(one.grad for one in model.parameters() if one.grad is not None)]

    same(*both(run, trained, monkeypatch))


def test_gradients_of_gradients(graphs: None, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        for _ in range(3):
            backward(model, IDS[0])
        some = [one for one in model.parameters() if one.requires_grad]
        loss = model(input_ids=IDS[0], labels=IDS[0]).loss
        norms = [one.square().sum() for one in torch.autograd.grad(loss, some, create_graph=True)]
        return list(torch.autograd.grad(torch.stack(norms).sum(), some))

    for one, due in zip(*both(run, lambda: trained("exact", attention="eager"), monkeypatch), strict=True):
        assert float((one - due).norm()) <= 1e-5 * float(due.norm())  # their sums have another order
    assert replays.count("forward") == 2 * LAYERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["int8", "int4", "train"])
def test_on_a_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of libraries may be other ones in a graph: their sums differ by roundings."""
    made: list[Any] = []

    def run(model: Any) -> list[Tensor]:
        model = model.cuda().to(torch.bfloat16)
        made.append(model)
        found = []
        for place in range(8):
            found += backward(model, IDS[place % 2].cuda())
            model.zero_grad()
        return found

    ours, due = both(run, lambda: trained(recipe), monkeypatch)
    assert paths(made[0]) == {CAPTURED: 4}
    for one, other in zip(ours, due, strict=True):
        assert float((one - other).float().norm()) <= 1e-2 * float(other.float().norm()) + 1e-6
