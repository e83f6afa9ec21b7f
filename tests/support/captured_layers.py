"""Models that train by captured layers, for which a CPU stands for the GPU, beside torch's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.graphs import capture, training_layers
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.captured_layer import CapturedLayer
from tests.support.lora import RECIPES, config, peft
from tests.support.steps import inner
from tests.support.tiny import CAUSAL

Found = dict[str, Any]
IDS = [torch.randint(3, 150, (2, length), generator=torch.Generator().manual_seed(length)) for length in (9, 12)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU, with graphs that run their program."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What captured layers were asked for."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(CapturedLayer, name, _counted(seen, name, getattr(CapturedLayer, name)))
    return seen


def _counted(seen: list[str], name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        seen.append(name)
        return stock(*args)

    return call


def trained(
    recipe: str = "int8", reentrant: bool = False, name: str = "llama", attention: str | None = None, **changes: Any
) -> Any:
    torch.manual_seed(1)
    options: Found = {} if attention is None else {"attn_implementation": attention}
    model: Any = accelpatch.patch(CAUSAL[name].make(**options), RECIPES.get(recipe, recipe), verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return peft.get_peft_model(model, config(**changes)).train()


def paths(model: Any) -> Found:
    return {name: count for name, count in inner(model).accelpatch.report().paths.items() if "training" in name}


def both(run: Callable[[Any], Any], make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What a run gives by captured layers, and by torch's checkpoint."""
    ours = run(make())
    with monkeypatch.context() as changed:
        changed.setattr(training_layers, "RUNS", 1 << 30)
        return ours, run(make())


def same(ours: Any, due: Any) -> None:
    assert len(ours) == len(due)
    for place, (one, other) in enumerate(zip(ours, due, strict=True)):
        assert torch.equal(one, other), place


def backward(model: Any, ids: Tensor, **more: Any) -> list[Tensor]:
    """The loss and all gradients of one call."""
    loss = model(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def steps(model: Any, count: int = 3, between: Callable[[Any, int], Any] | None = None) -> list[Tensor]:
    """Steps of AdamW over two batches each; losses, gradients and parameters of all of them."""
    found: list[Tensor] = []
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for step in range(count):
        for ids in IDS:
            found += backward(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        found += [one.detach().clone() for one in model.parameters() if one.requires_grad]
        if between is not None:
            made = between(model, step)
            found += [made] if isinstance(made, Tensor) else []
    return found
