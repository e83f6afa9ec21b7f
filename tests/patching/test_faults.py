"""All or nothing: whatever goes wrong at whichever site, the model is afterwards as it came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.patching import apply, stages
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, padded_batch, snapshot

FAULTS: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: RuntimeError("injected"),
    "device-memory": lambda: torch.OutOfMemoryError("injected"),
    "memory": lambda: MemoryError("injected"),
    "interrupt": lambda: KeyboardInterrupt(),
}
RECIPES = {"int8": "llama", "int4": "gpt2"}  # a tied head in both; two formats and fused parents; Conv1D


class Nth:
    """`function`, but its n-th call raises (n from 0); with `late`, after it has done its work."""

    def __init__(self, function: Callable[..., Any], n: int, fault: Callable[[], BaseException], late: bool):
        self.function, self.left, self.fault, self.late = function, n, fault, late

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1 and not self.late:
            raise self.fault()
        result = self.function(*args, **kwargs)
        if self.left == -1:
            raise self.fault()
        return result


def inject(monkeypatch: pytest.MonkeyPatch, stage: str, call: Nth) -> None:
    """Put the failing call in place of the stage's function."""
    owner, name = STAGES[stage]
    call.function = getattr(owner, name)
    wrapper = (lambda self, *a, **k: call(self, *a, **k)) if isinstance(owner, type) else call
    monkeypatch.setattr(owner, name, wrapper)


STAGES: dict[str, tuple[Any, str]] = {
    "build": (apply, "_build"),
    "verify": (stages, "site_errors"),
    "swap": (apply.Change, "apply"),
    "check": (stages, "compare_logits"),
    "release": (apply, "release_originals"),
    "capture": (stages, "run"),
}


def calls_of(model: nn.Module, recipe: str, stage: str) -> int:
    """How often a patch of this model calls the stage's function."""
    plan = accelpatch.plan(model, recipe)
    modules = sum(1 + len(entry.site.tied) for entry in plan.replaced)
    places = sum(len(entry.site.paths) for entry in plan.replaced)
    classes = sum(isinstance(part, PreTrainedModel) for part in model.modules())
    swaps = (
        places + 3 * classes + 3
    )  # a mark, a class and what looks at code each; and the model's runtime, handle and way to save
    counts = {"build": len(plan.replaced), "verify": modules, "swap": swaps, "check": 1, "release": 1, "capture": 2}
    return counts[stage]


def assert_untouched(model: nn.Module, before: dict[str, Any], expected: torch.Tensor) -> None:
    assert snapshot(model) == before
    assert logits(model, padded_batch()).equal(expected)


@pytest.mark.each_value
@pytest.mark.parametrize("keep_original", ["cpu", "none"])
@pytest.mark.parametrize("stage", [pytest.param(stage, id=stage) for stage in STAGES])
@pytest.mark.parametrize(
    "recipe", [pytest.param("int8", id="int8"), pytest.param("int4", id="int4", marks=pytest.mark.smoke)]
)
def test_an_error_at_every_call_in_turn(
    recipe: str, stage: str, keep_original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CAUSAL[RECIPES[recipe]].make()
    before, expected = snapshot(model), logits(model, padded_batch())
    count = calls_of(model, recipe, stage)
    inputs = [padded_batch()] if stage == "capture" else None  # those made for a model may be refused by it
    for n in range(count):
        with monkeypatch.context() as patching:
            call = Nth(len, n, FAULTS["exception"], late=False)
            inject(patching, stage, call)
            with pytest.raises((RuntimeError, PatchError)):
                accelpatch.patch(model, recipe, keep_original=keep_original, inputs=inputs)
            assert call.left == -1, "the fault was not the last thing that happened"
        assert_untouched(model, before, expected)
    with monkeypatch.context() as patching:
        call = Nth(len, count, FAULTS["exception"], late=False)
        inject(patching, stage, call)
        # a second patch works, and no call was missed
        accelpatch.patch(model, recipe, keep_original=keep_original, inputs=inputs)
        assert call.left == 0
    assert model.accelpatch.report().verification.failures == []


@pytest.mark.each_value
@pytest.mark.parametrize("late", [pytest.param(False, id="before"), pytest.param(True, id="after")])
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault) for fault in FAULTS])
@pytest.mark.parametrize("stage", ["build", "verify", "swap", "check"])
def test_every_kind_of_fault(stage: str, fault: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["llama"].make()
    before, expected = snapshot(model), logits(model, padded_batch())
    last = calls_of(model, "int8", stage) - 1
    for n in {0, last // 2, last}:
        with monkeypatch.context() as patching:
            inject(patching, stage, Nth(len, n, FAULTS[fault], late))
            named = "memory" in fault and stage != "swap"  # a swap allocates nothing: there the error comes as it is
            with pytest.raises(PatchError if named else type(FAULTS[fault]())):
                accelpatch.patch(model, "int8")
        assert_untouched(model, before, expected)
    accelpatch.patch(model, "int8")


@pytest.mark.parametrize("fault", ["device-memory", "memory"])
def test_out_of_memory_names_the_site_and_says_what_to_do(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["llama"].make()
    entry = accelpatch.plan(model, "int8").replaced[4]
    inject(monkeypatch, "build", Nth(len, 4, FAULTS[fault], late=False))
    with pytest.raises(PatchError, match=r"out of memory while .*; nothing was changed") as caught:
        accelpatch.patch(model, "int8")
    assert entry.site.path in str(caught.value)


def test_an_interrupt_while_the_model_runs_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, "int8")
    monkeypatch.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("n", [0, 1, 7])
def test_an_interrupt_while_the_originals_are_freed(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["llama"].make()
    before, expected = snapshot(model), logits(model, padded_batch())
    left = [n]

    def setting(self: apply.Change, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "old" and value is None:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

    monkeypatch.setattr(apply.Change, "__setattr__", setting)
    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, "int8", keep_original="none")
    assert left == [-1]
    assert_untouched(model, before, expected)


def test_a_failing_progress_call_undoes_everything() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "check":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        accelpatch.patch(model, "int8", progress=progress)
    assert snapshot(model) == before
