"""Layers on several devices: one graph a device, handed on by copies. On the CPU, with devices in name alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

import accelpatch
from accelpatch.fusion import read_layers
from accelpatch.fusion.fused_model import FUSED, FusedModel
from accelpatch.fusion.spread import Spread, moves_only, rotary_on
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture, split_step
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.split_step import SplitStep
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.offloaded import PARTS
from tests.support.steps import assert_like_the_stock_loop
from tests.support.tiny import CAUSAL, full_batch, padded_batch

ONE, TWO, THREE = (torch.device("cpu", index) for index in range(3))
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
#: device of the embedding, of the layers, and of the head
MAPS: dict[str, tuple[torch.device, tuple[torch.device, ...], torch.device]] = {
    "halves": (ONE, (ONE, ONE, TWO, TWO), TWO),
    "head-on-the-first": (ONE, (ONE, TWO, TWO, TWO), ONE),
    "ends-apart": (ONE, (TWO, TWO, TWO, TWO), THREE),
    "back-and-forth": (ONE, (ONE, TWO, ONE, TWO), TWO),
}
maps = pytest.mark.parametrize("kind", MAPS)


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]


@pytest.fixture
def spread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, layers, last = MAPS[kind]
    monkeypatch.setattr(read_layers, "spread_of", lambda *parts: Spread(layers, first, last))


def tiny(name: str = "qwen2") -> Any:
    return CAUSAL[name].make(num_hidden_layers=4)


def fused(model: Any) -> FusedModel:
    found = vars(model)[RUNTIME].captured.fused
    assert isinstance(found, FusedModel)
    return found


def step_of(model: Any) -> Any:
    return next(iter(vars(model)[RUNTIME].captured._steps.values()))


@maps
def test_steps_of_parts(kind: str, spread: None) -> None:
    whole, model = tiny(), accelpatch.patch(tiny(), "exact")
    assert model.accelpatch.report().verification.failures == []
    for batch in (full_batch(), padded_batch()):
        for options in (GREEDY, GREEDY | {"num_beams": 2}, GREEDY | {"repetition_penalty": 1.3}):
            assert torch.equal(model.generate(**batch, **options), whole.generate(**batch, **options)), options
    paths = model.accelpatch.report().paths
    assert paths[FUSED] == paths[CAPTURED] > 0
    assert isinstance(step_of(model)._parts, SplitStep)


@maps
def test_logits_while_the_cache_grows(kind: str, spread: None) -> None:
    """A larger capacity takes over the masks of all devices."""
    model = accelpatch.patch(tiny(), parse("extends: exact\nruntime: {max_length: 1024}"))
    batch = padded_batch(60)
    assert_like_the_stock_loop(model, {name: value[:2] for name, value in batch.items()}, new=8)
    assert_like_the_stock_loop(model, padded_batch(), new=8)


@pytest.mark.parametrize("kind", ["halves"])
def test_one_copy_a_device_and_token(kind: str, spread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[torch.device, torch.device]] = []
    copies = split_step._pass_on
    monkeypatch.setattr(split_step, "_pass_on", lambda a, b: (handed.append((a.device, b.device)), copies(a, b)))
    model = accelpatch.patch(tiny(), "exact", verify=False)
    model.generate(**full_batch(), **GREEDY)
    assert handed == [(ONE, TWO)] * (GREEDY["max_new_tokens"] - 1)
    lanes = step_of(model)._parts.lanes
    assert [lane.home for lane in lanes.values()] == [False, True]
    assert lanes[TWO].state is step_of(model).batch.state  # the sampler's own
    assert torch.equal(lanes[ONE].mask, step_of(model).mask)


@pytest.mark.parametrize("kind", ["halves"])
def test_a_watched_layer_runs_between_the_graphs(kind: str, spread: None) -> None:
    whole, model = tiny(), accelpatch.patch(tiny(), "exact")
    calls: list[int] = []
    for one in (whole, model):
        one.model.layers[2].register_forward_hook(lambda module, args, output: calls.append(len(args)))
    assert torch.equal(model.generate(**padded_batch(), **GREEDY), whole.generate(**padded_batch(), **GREEDY))
    assert len(calls) == 2 * GREEDY["max_new_tokens"]
    assert model.accelpatch.report().paths[CAPTURED] == GREEDY["max_new_tokens"] - 1


@pytest.mark.parametrize("kind", ["halves"])
def test_prompts_and_drafts_are_not_captured_across_devices(kind: str, spread: None) -> None:
    recipe = parse("extends: exact\nruntime: {speculate: prompt_lookup}")
    model = accelpatch.patch(tiny(), recipe)
    batch = {name: value[:1] for name, value in full_batch().items()}
    for _ in range(3):
        model.generate(**batch, **GREEDY)
        model(**batch)
    assert any("several devices" in path for path in model.accelpatch.report().paths)
    assert step_of(model).prompts._captured == {}
    assert fused(model).in_parts


def hooked(model: Any) -> Any:
    return dispatch_model(model, dict.fromkeys((*PARTS, "model.layers.2", "model.layers.3"), "cpu"), force_hooks=True)


def test_hooks_that_only_move_inputs_are_no_reason_for_the_stock_loop() -> None:
    model = accelpatch.patch(hooked(tiny()), "exact")
    assert torch.equal(model.generate(**padded_batch(), **GREEDY), tiny().generate(**padded_batch(), **GREEDY))
    paths = model.accelpatch.report().paths
    assert paths[CAPTURED] == paths[FUSED] == GREEDY["max_new_tokens"] - 1
    assert not any(path.startswith("stock loop") for path in paths)
    with torch.no_grad():
        model(**padded_batch())  # the model's own hook lets the call go on to the patched forward
    assert any(path.startswith("fused forward") for path in model.accelpatch.report().paths)


class Doubling(AlignDevicesHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return 2 * output


def test_other_hooks_are() -> None:
    """Also one that comes in place of accelerate's, which is seen at the next step."""
    model = accelpatch.patch(hooked(tiny()), "exact")
    model.generate(**padded_batch(), **GREEDY)
    before = model.accelpatch.report().paths[CAPTURED]
    norm = model.model.norm
    assert moves_only(norm)
    remove_hook_from_module(norm)
    add_hook_to_module(norm, Doubling())
    assert not moves_only(norm)
    whole = tiny()
    whole.model.norm.register_forward_hook(lambda module, args, output: 2 * output)
    assert torch.equal(model.generate(**padded_batch(), **GREEDY), whole.generate(**padded_batch(), **GREEDY))
    assert model.accelpatch.report().paths[CAPTURED] == before


def test_unpatch_leaves_the_hooks_and_the_map() -> None:
    model = hooked(tiny())

    def state() -> Sequence[Any]:
        names = ("_hf_hook", "_old_forward", "forward", "to", "cuda")
        held = [[vars(module).get(name) for name in names] for module in model.modules()]
        return [model.hf_device_map, held, type(model)]

    before = state()
    accelpatch.patch(model, "int8")
    accelpatch.unpatch(model)
    assert state() == before


def test_stretches() -> None:
    spread = Spread((ONE, ONE, TWO, ONE), ONE, TWO)
    assert list(spread.stretches(range(4))) == [(ONE, [0, 1]), (TWO, [2]), (ONE, [3])]
    assert list(spread.stretches([3, 1, 2])) == [(ONE, [3, 1]), (TWO, [2])]
    assert list(spread.stretches([])) == []


def test_a_rotary_embedding_for_another_device() -> None:
    model = hooked(tiny())
    rotary = model.model.rotary_emb
    assert rotary_on(rotary, torch.device("cpu")) is rotary
    there = rotary_on(rotary, torch.device("meta"))
    assert there.inv_freq.is_meta
    assert not rotary.inv_freq.is_meta
    assert "_hf_hook" not in vars(there)
    assert rotary_on(rotary, torch.device("meta")) is there
    assert rotary_on(None, ONE) is None
    assert copy.deepcopy(model) is not model
