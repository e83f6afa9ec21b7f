"""Training with gradient checkpointing by captured layers: the numbers of torch's checkpoint, bit for bit, and where a
graph would be wrong torch's checkpoint itself."""

from __future__ import annotations

import gc
import weakref
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
from accelpatch.runtime.graphs.training_layers import CAPTURED
from tests.support.lora import RECIPES, config, peft
from tests.support.refusing import RefusingGraph
from tests.support.steps import inner
from tests.support.tiny import CAUSAL, LAYERS, padded_batch

Found = dict[str, Any]
IDS = [torch.randint(3, 150, (2, length), generator=torch.Generator().manual_seed(length)) for length in (9, 12)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU, with graphs that run their program."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
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


def trained(recipe: str = "int8", reentrant: bool = False, name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(1)
    model = accelpatch.patch(CAUSAL[name].make(), RECIPES.get(recipe, recipe), verify=False)
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
    monkeypatch.setitem(capture.GRAPHS, "cpu", RefusingGraph)  # type: ignore[arg-type]
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
    """Without adapters, with gradients enabled as in a loss that compares the two."""
    with model.disable_adapter():
        return model(input_ids=IDS[0]).logits.detach()


def _frozen(model: Any, step: int) -> None:
    """Another part trains from here on."""
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.requires_grad_((".layers.0." not in name) if step % 4 < 2 else "q_proj" in name)


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
        norm = sum(one.square().sum() for one in torch.autograd.grad(loss, some, create_graph=True))
        return list(torch.autograd.grad(norm, some))  # type: ignore[call-overload]

    same(*both(run, lambda: trained("exact"), monkeypatch))
    assert replays.count("forward") == 2 * LAYERS


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
    assert len(seen) >= 3
    assert not replays
    assert {path.partition(": ")[2] for path in paths(model)} >= {"a hook in a layer", "autocast"}
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
