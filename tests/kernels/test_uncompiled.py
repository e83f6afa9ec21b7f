"""An implementation that does not compile: the next one runs, the reason is said, and nothing else changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN, probe
from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import choice, dispatch, uncompiled
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.spec import Implementation, Spec

CPU, REASON = torch.device("cpu"), "Triton 3.9.0 cannot compile it for gfx942: the compiler ended with SIGABRT"
OPS = [
    op
    for op in dispatch.TABLE
    if "triton" in dispatch.kernel(op).implementations and op != "flash_attention" and list(dispatch.kernel(op).cases())
]  # flash_attention has an order by device, without Triton on a CPU
Plant = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncompiled, "_found", {})
    monkeypatch.setattr(dispatch, "_selected", {})
    dispatch.calls.clear()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """A function that gives an operation an implementation, tried first, that does not compile; returns its calls."""

    def planted(op: str, name: str = "triton", why_not: Any = dispatch.anywhere) -> list[int]:
        ran: list[int] = []

        def run(*args: Any) -> Any:
            ran.append(1)
            raise CompileError(REASON)

        entry = dispatch.kernel(op)
        monkeypatch.setitem(
            vars(entry), "implementations", {**entry.implementations, name: Implementation(run, why_not)}
        )
        others = [one for one in choice.TABLE[op][-1].order if one != name]
        monkeypatch.setattr(choice, "TABLE", {**choice.TABLE, op: (choice.Row((name, *others)),)})
        return ran

    return planted


def arguments(op: str) -> tuple[Any, ...]:
    case = next(iter(dispatch.kernel(op).cases()))
    return case.make(torch.Generator().manual_seed(0), torch.float32, CPU)


def attention(length: int = 3, softcap: float = 20.0) -> tuple[Any, ...]:
    q = torch.randn(1, 2, length, 64, generator=torch.Generator().manual_seed(0))
    return q, q, q, None, None, None, True, 0, softcap, 0.125


@pytest.mark.filterwarnings("ignore:.*another implementation runs")
@pytest.mark.parametrize("op", OPS)
def test_the_next_one_runs(op: str, plant: Plant) -> None:
    expected = dispatch.kernel(op).op(*arguments(op))
    due = dispatch.calls.copy()
    dispatch.calls.clear()
    ran = plant(op)
    dispatch.forget()
    for _ in range(3):
        found = dispatch.kernel(op).op(*arguments(op))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert len(ran) == 1
    assert +dispatch.calls == {key: 3 * times for key, times in due.items()}


def test_the_reason_is_said_once_and_given_to_who_asks(plant: Plant) -> None:
    ran, args = plant("flash_attention", "cpu"), attention()
    with pytest.warns(UserWarning, match=r"flash_attention: another .* in place of 'cpu': Triton 3\.9"):
        flash_attention.flash_attention(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attention.flash_attention(*args)
    spec, device = flash_attention.spec(*args), probe("cpu")
    assert dispatch.why_not("flash_attention", "cpu", spec, device) == REASON
    assert dispatch.choose("flash_attention", spec, device) == "eager"  # a softcap is none of sdpa's
    assert len(ran) == 1
    with dispatch.forced("cpu"), pytest.raises(KernelError, match=r"'cpu' cannot run here: Triton 3\.9\.0 cannot"):
        flash_attention.flash_attention(*args)


def test_other_calls_and_archs_are_asked_for_themselves(plant: Plant) -> None:
    ran, args = plant("flash_attention", "cpu"), attention()
    with pytest.warns(UserWarning, match="another implementation"):
        flash_attention.flash_attention(*args)
    for other in (attention(length=4), attention(softcap=0.0)):
        assert dispatch.why_not("flash_attention", "cpu", flash_attention.spec(*other), probe("cpu")) is None
    spec = flash_attention.spec(*args)
    assert uncompiled.reason("cpu", spec, KNOWN["gfx942"]) is None
    assert uncompiled.reason("sdpa", spec, probe("cpu")) is None
    with pytest.warns(UserWarning, match="another implementation"):
        flash_attention.flash_attention(*attention(length=4))
    assert len(ran) == 2


@pytest.mark.filterwarnings("ignore:.*another implementation runs")
def test_arguments_that_hold_tensors_are_known_by_their_facts() -> None:
    def spec(size: int = 64) -> Spec:
        shape = AttentionShape(4, 2, size, 0.125, torch.ones(size // 2))
        return Spec("decode_attention", {"B": 1, "T": 1, "L": 8}, torch.bfloat16, options={"shape": shape})

    device = KNOWN["gfx942"]
    uncompiled.remember("triton", spec(), device, REASON)
    assert dispatch.why_not("decode_attention", "triton", spec(), device) == REASON
    assert uncompiled.reason("triton", spec(128), device) is None


def test_one_that_is_forced_raises(plant: Plant) -> None:
    ran = plant("rmsnorm")
    with dispatch.forced("triton"), pytest.raises(CompileError, match="SIGABRT"):
        dispatch.kernel("rmsnorm").op(*arguments("rmsnorm"))
    assert ran == [1]


@pytest.mark.filterwarnings("ignore:.*another implementation runs")
def test_what_is_watched_is_what_ran(plant: Plant) -> None:
    plant("rmsnorm")
    seen: list[str] = []
    with dispatch.observed(lambda op, args, result: seen.append(op)):
        dispatch.kernel("rmsnorm").op(*arguments("rmsnorm"))
    assert seen == ["rmsnorm"]
    assert +dispatch.calls == {("rmsnorm", "torch"): 1}


@pytest.mark.filterwarnings("ignore:.*another implementation runs")
@pytest.mark.parametrize("forced", [None, "operations"], ids=["chosen", "forced operations"])
def test_a_part_of_a_composed_one_is_replaced_alone(forced: str | None, plant: Plant) -> None:
    ran, args = plant("quantize_rows"), arguments("w8a8_linear")
    for _ in range(2):
        if forced is None:
            dispatch.kernel("w8a8_linear").op(*args)
        else:
            with dispatch.forced(forced):
                dispatch.kernel("w8a8_linear").op(*args)
    assert len(ran) == 1
    assert dispatch.calls["w8a8_linear", "operations"] == dispatch.calls["quantize_rows", "torch"] == 2


def test_without_another_every_reason_is_given(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("rmsnorm")
    monkeypatch.setattr(choice, "TABLE", {**choice.TABLE, "rmsnorm": (choice.Row(("triton",)),)})
    with (
        pytest.warns(UserWarning, match="another implementation"),
        pytest.raises(KernelError, match=r"no implementation of rmsnorm runs (.|\n)*triton: Triton 3.9.0 cannot"),
    ):
        dispatch.kernel("rmsnorm").op(*arguments("rmsnorm"))


@pytest.mark.filterwarnings("ignore:.*another implementation runs")
def test_ever_new_shapes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncompiled, "MOST", 4)
    spec = flash_attention.spec(*attention())
    for keys in range(20):
        uncompiled.remember("triton", replace(spec, sizes={**spec.sizes, "S": keys}), KNOWN["gfx942"], REASON)
        assert 0 < len(uncompiled._found) <= 4
