"""The self-test covers every implementation, and shows one that is wrong, refuses, or does not start."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check import attention_check, selftest
from accelpatch.kernels.ops.attention import packages as attention_packages
from accelpatch.kernels.ops.attention.decode_attention import reference_
from accelpatch.kernels.ops.linear.int8_linear import reference
from accelpatch.kernels.spec import Case, Implementation


def test_everything_passes_and_is_covered() -> None:
    records = selftest.run("cpu")
    assert [record for record in records if record.ok is False] == []
    left_out = {(record.implementation, bool(record.reason)) for record in records if record.ok is None}
    of_gpus = {(name, True) for name in ("ck", "hip", "hip_gemm", "hip_unpack", "scaled_mm", "triton", "triton_wgmma")}
    of_gpus |= {(name, True) for name in ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")}
    of_packages = {(name, True) for name in attention_packages.IMPLEMENTATIONS}
    some = {("int_mm", True), ("sdpa", True), ("cpu", True), ("cpu_stored", True)}
    left = "a GPU's kernels and other packages' alone do not run here, and cases that an implementation does not take"
    assert left_out == of_gpus | of_packages | some, left
    assert {
        record.case.split("-")[0] for record in records if record.ok is None and "int_mm" in record.implementation
    } == {"m0"}
    covered = {(record.op, record.implementation) for record in records}
    attention = {(attention_check.OP, name) for name in attention_check.IMPLEMENTATIONS}
    names = {op: tuple(dispatch.kernel(op).implementations) for op in dispatch.TABLE}
    assert covered == {(op, name) for op in names if dispatch.kernel(op).registered for name in names[op]} | attention
    cases = {op: len(list(dispatch.kernel(op).cases())) for op in dispatch.TABLE}
    due = sum(cases[op] * len(names[op]) for op in dispatch.TABLE)
    assert len(records) == 3 * (due + len(attention_check.STEPS) * len(attention))
    assert json.dumps([record.to_dict() for record in records])


def records_of(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], reason: str | None) -> list[Any]:
    kernel = dispatch.kernel("int8_linear")
    monkeypatch.setitem(vars(kernel), "implementations", {"new": Implementation(run, lambda spec, device: reason)})
    monkeypatch.setattr(dispatch, "TABLE", {"int8_linear": "linear.int8_linear"})
    monkeypatch.setattr(attention_check, "IMPLEMENTATIONS", {})
    return selftest.run("cpu")


def test_wrong_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost_tail(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        whole = q.shape[1] // 64 * 64
        kept = q.clone()
        kept[:, whole:] = 0
        return reference(x, kept, scale, bias)

    failed = {record.case.rsplit("-", 1)[0] for record in records_of(monkeypatch, lost_tail, None) if not record.ok}
    assert failed == {"m2-n1-k66-g66-bias", "m7-n33-k130-g130", "m129-n65-k96-g32-bias", "m8-n256-k2-g2-bias"}


def test_refused_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(monkeypatch, reference, "needs a GPU")
    assert {(record.ok, record.reason) for record in records} == {(None, "needs a GPU")}


def test_one_that_does_not_start_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    records = records_of(monkeypatch, broken, None)
    assert {(record.ok, record.reason) for record in records} == {(False, "RuntimeError: no kernel image")}


def test_one_that_does_not_compile_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def aborting(*args: Any) -> torch.Tensor:
        raise CompileError("the compiler ended with SIGABRT")

    records = records_of(monkeypatch, aborting, None)
    assert {(record.ok, record.reason) for record in records} == {(None, "the compiler ended with SIGABRT")}
    monkeypatch.undo()
    assert set(attention_records(monkeypatch, aborting).values()) == {None}


def test_arguments_that_cannot_be_made_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: Any) -> Any:
        raise KernelError("there is no library")

    kernel = dispatch.kernel("int8_linear")
    monkeypatch.setitem(vars(kernel), "cases", lambda: [Case("one", no_library)])
    monkeypatch.setattr(dispatch, "TABLE", {"int8_linear": dispatch.TABLE["int8_linear"]})
    monkeypatch.setattr(attention_check, "IMPLEMENTATIONS", {})
    assert {(record.ok, record.reason) for record in selftest.run("cpu")} == {(None, "there is no library")}


def attention_records(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> dict[str, bool | None]:
    monkeypatch.setattr(dispatch, "TABLE", {"rotary_cos_sin": dispatch.TABLE["rotary_cos_sin"]})
    monkeypatch.setattr(attention_check, "IMPLEMENTATIONS", {"new": run})
    monkeypatch.setattr(attention_check, "why_not", lambda *_: None)
    return {record.case: record.ok for record in selftest.run("cpu") if record.op == attention_check.OP}


def test_attention_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attention_records(monkeypatch, reference_)
    assert len(found) == 3 * len(attention_check.STEPS)
    assert all(found.values())


def test_attention_that_loses_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(
        qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
    ) -> Tensor:
        hidden = mask.clone()
        hidden.scatter_(1, (slot[:, None] - 1).clamp(min=0), 0)  # each row's own last one
        return reference_(qkv, positions, slot, hidden, keys, values, shape)

    wrong = {case.rsplit("-", 1)[0] for case, ok in attention_records(monkeypatch, lost).items() if not ok}
    assert wrong == attention_check.STEPS.keys() - {"first-token"}


def test_attention_that_reads_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def nosy(
        qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
    ) -> Tensor:
        return reference_(qkv, positions, slot, torch.ones_like(mask), keys, values, shape)

    wrong = {case.rsplit("-", 1)[0] for case, ok in attention_records(monkeypatch, nosy).items() if not ok}
    assert wrong == {id_ for id_, step in attention_check.STEPS.items() if step.padding}
