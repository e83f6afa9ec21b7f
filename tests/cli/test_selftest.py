"""accelpatch selftest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import Tensor

from accelpatch.kernels.check.selftest import SelftestRecord
from accelpatch.kernels.ops.norm import rmsnorm

from .conftest import Cli


@pytest.mark.nightly  # the page of the README runs it too
def test_everything_on_this_cpu_is_right(cli: Cli) -> None:
    result = cli("selftest", "--device", "cpu", "--json")
    records = json.loads(result.stdout)
    assert result.exit_code == 0
    assert len([record for record in records if record["ok"]]) > 100
    assert [record for record in records if record["ok"] is False] == []


def _records(ok: bool | None) -> list[SelftestRecord]:
    return [
        SelftestRecord("rmsnorm", "torch", "odd-float32", 1e-7, 1e-6, True, ""),
        SelftestRecord("rmsnorm", "hip", "odd-float32", 3.0, 1e-6, ok, "row 3 differs"),
    ]


@pytest.mark.parametrize(
    ("ok", "status", "words"),
    [
        pytest.param(True, 0, "2 cases ran, 0 wrong", id="right"),
        pytest.param(False, 1, "WRONG rmsnorm by hip, odd-float32: error 3.000e+00", id="wrong"),
        pytest.param(None, 0, "not run here, 1 cases: rmsnorm by hip: row 3 differs", id="not run"),
    ],
)
def test_status(cli: Cli, monkeypatch: pytest.MonkeyPatch, ok: bool | None, status: int, words: str) -> None:
    monkeypatch.setattr("accelpatch.api.selftest", lambda device: _records(ok))
    result = cli("selftest", "--device", "cpu", "--verbose")
    assert result.exit_code == status
    assert words in result.stdout


def test_the_summary_is_short_and_has_every_failure(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for ok in (True, None, False):
        monkeypatch.setattr("accelpatch.api.selftest", lambda device, ok=ok: 20 * _records(ok))
        lines = cli("selftest", "--device", "cpu").stdout.splitlines()
        assert sum(line.startswith("WRONG rmsnorm by hip") for line in lines) == (20 if ok is False else 0)
        assert len([line for line in lines if not line.startswith("WRONG")]) <= 10
        assert ("not run here at all, with their operations: hip (1)" in lines[-2]) == (ok is None)


def test_a_wrong_kernel_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rmsnorm.KERNELS["rmsnorm"].implementations["torch"]

    def wrong(*args: object) -> Tensor:
        result = right.run(*args)
        assert isinstance(result, Tensor)
        return result * 1.01

    monkeypatch.setitem(rmsnorm.KERNELS["rmsnorm"].implementations, "torch", replace(right, run=wrong))
    result = cli("selftest", "--device", "cpu")
    assert result.exit_code == 1
    assert {line.split(",")[0] for line in result.stdout.splitlines() if line.startswith("WRONG")} == {
        "WRONG rmsnorm by torch",
        "WRONG rmsnorm_rows by operations",  # runs it
        "WRONG reorder by operations",  # so do these
        "WRONG routed_experts by operations",
    }
