"""accelpatch tune kernels: what is measured, what is stored, and that calls choose by it from then on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch import device as devices
from accelpatch.errors import KernelError, PatchError
from accelpatch.kernels import dispatch, measured
from accelpatch.kernels.spec import Implementation
from accelpatch.trials import tune_kernels
from accelpatch.tuning import kernels
from tests.support import tiny

OP = "int8_linear"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    measured.forget()
    dispatch.forget()
    yield
    measured.forget()
    dispatch.forget()


def _slowed(run: Any, seconds: float) -> Any:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return run(*args)

    return slow


@pytest.fixture
def op() -> tuple[str, Any, tuple[Any, ...]]:
    """An operation in plain torch, a call of 3 rows, and its implementations."""
    case = next(iter(dispatch.kernel(OP).cases()))
    args = case.make(torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))
    return OP, dispatch.kernel(OP).implementations, args


@pytest.fixture
def call(op: tuple[str, Any, tuple[Any, ...]]) -> kernels.Call:
    name, _, args = op
    return kernels.Call(dispatch.kernel(name).spec(*args), args)


def _other(monkeypatch: pytest.MonkeyPatch, every: Any, run: Any, default: float = 0.0) -> None:
    """Add the implementation `other` to an operation, whose own takes so many seconds more."""
    stock = every["torch"]
    monkeypatch.setitem(every, "torch", Implementation(_slowed(stock.run, default), stock.why_not))
    monkeypatch.setitem(every, "other", Implementation(run, dispatch.anywhere))


def test_a_faster_one_is_taken_from_then_on(op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    name, every, _ = op
    _other(monkeypatch, every, every["torch"].run, default=0.01)
    device = devices.probe("cpu")
    assert dispatch.choose(name, call.spec, device) == "torch"
    (found,) = kernels.tune([call], device, budget=60)
    assert (found.default, found.chosen) == ("torch", "other")
    assert found.gain > 1.02
    assert dispatch.choose(name, call.spec, device) == "other"
    near = replace(call.spec, sizes={**call.spec.sizes, "M": call.rows * 8})
    assert dispatch.choose(name, near, device) == "torch"  # of so many rows nothing was measured
    assert measured.KIND in [one.kind for one in accelpatch_cache()]


def accelpatch_cache() -> Any:
    from accelpatch import cache

    return cache.listing()


def test_the_default_stays_unless_another_gains_enough(
    op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, every, _ = op
    _other(monkeypatch, every, every["torch"].run)
    times = {"torch": 1.00, "other": 0.99}
    monkeypatch.setattr(kernels, "_seconds", lambda call, name: times[name])
    (found,) = kernels.tune([call], devices.probe("cpu"), budget=60)
    assert (found.chosen, found.gain) == ("torch", 1.0)
    assert dispatch.choose(name, call.spec, devices.probe("cpu")) == "torch"


def test_a_gain_that_does_not_come_again_does_not_count(
    op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, every, _ = op
    _other(monkeypatch, every, every["torch"].run)
    times = {"torch": iter((1.0, 1.0)), "other": iter((0.5, 1.0))}
    monkeypatch.setattr(kernels, "_seconds", lambda call, name: next(times[name]))
    (found,) = kernels.tune([call], devices.probe("cpu"), budget=60)
    assert found.chosen == "torch"


def test_wrong_and_failing_ones_do_not_count(op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    _, every, _ = op
    run = every["torch"].run
    _other(monkeypatch, every, lambda *args: run(*args) * 1.5, default=0.01)
    failing = Implementation(lambda *args: (_ for _ in ()).throw(RuntimeError("no image")), dispatch.anywhere)
    monkeypatch.setitem(every, "failing", failing)
    (found,) = kernels.tune([call], devices.probe("cpu"), budget=60)
    assert found.chosen == "torch"
    assert found.refused["other"].startswith("its output is wrong")
    assert found.refused["failing"] == "RuntimeError: no image"


def test_another_device_or_release_finds_nothing(op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    _, every, _ = op
    _other(monkeypatch, every, every["torch"].run, default=0.01)
    device = devices.probe("cpu")
    kernels.tune([call], device, budget=60)
    assert measured.preferred(call.spec, device) == ("other",)
    assert measured.preferred(call.spec, replace(device, name="another CPU")) == ()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    measured.forget()
    assert measured.preferred(call.spec, device) == ()


def test_a_second_run_takes_back_what_is_no_longer_faster(
    op: Any, call: kernels.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, every, _ = op
    _other(monkeypatch, every, every["torch"].run)
    device, times = devices.probe("cpu"), {"torch": 1.0, "other": 0.5}
    monkeypatch.setattr(kernels, "_seconds", lambda call, name: times[name])
    kernels.tune([call], device, budget=60)
    assert measured.preferred(call.spec, device) == ("other",)
    times["other"] = 1.0
    kernels.tune([call], device, budget=60)
    assert measured.preferred(call.spec, device) == ()


def test_a_damaged_file_is_named(call: kernels.Call) -> None:
    device = devices.probe("cpu")
    file = measured.store(device, [measured.Faster("x", 1, "torch", 2.0)], [])
    file.write_text("{")
    measured.forget()
    with pytest.raises(KernelError, match=r"is damaged .* run `accelpatch tune kernels` again"):
        measured.preferred(call.spec, device)


def test_the_calls_of_a_patched_model_are_measured() -> None:
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    with pytest.raises(PatchError, match="not patched"):
        tune_kernels(model)
    with accelpatch.patched(model, "int8", verify=False):
        found = tune_kernels(model, rows=(1, 3), store=False)
    assert {one.rows for one in found} == {1, 3}
    assert {one.op for one in found} >= {"packed_linear"}
    assert all(one.seconds[one.default] > 0 for one in found)
    assert accelpatch_cache() == [] or all(one.kind != measured.KIND for one in accelpatch_cache())


def test_the_time_bounds_what_is_measured(call: kernels.Call) -> None:
    assert kernels.tune([call], devices.probe("cpu"), budget=0) == []
