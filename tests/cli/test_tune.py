"""accelpatch tune attention: what it prints, what it stores, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelpatch import device as devices
from accelpatch.errors import CompileError
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.attention import sdpa as attention_sdpa
from accelpatch.kernels.ops.attention.stored import orders_of
from accelpatch.kernels.spec import Implementation

from .conftest import Cli

SMALL = ("--device", "cpu", "--lengths", "32,64", "--sizes", "16", "--heads", "4", "--kv-heads", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    orders_of.cache_clear()
    yield
    orders_of.cache_clear()


def test_the_table_and_what_is_stored(cli: Cli) -> None:
    result = cli("tune", "attention", *SMALL)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:4] == ["TFLOP/s", "head", "length", "batch"]
    assert [row[:3] for row in rows if row and row[0] in ("causal", "full")] == [
        ["causal", "16", "32"], ["full", "16", "32"], ["causal", "16", "64"], ["full", "16", "64"],
    ]  # fmt: skip
    assert "not run: sdpa_flash: torch's flash attention runs on GPUs" in result.stdout
    stored = orders_of(devices.probe("cpu"))
    assert next((one.dtype, one.size, one.length, one.causal) for one in stored) == ("float32", 16, 32, True)
    assert all(set(one.names) == {"sdpa", "eager"} for one in stored)


def test_a_dry_run_stores_nothing(cli: Cli) -> None:
    result = cli("tune", "attention", *SMALL, "--dry-run", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found[0]["order"][0] in ("sdpa", "eager")
    assert found[0]["tflops"]["sdpa"] > 0
    assert orders_of(devices.probe("cpu")) == ()


def test_wrong_numbers_do_not_count(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Implementation(lambda *args: attention_sdpa.by_sdpa(*args) * 1.01, attention_sdpa.why_not)
    failing = Implementation(lambda *args: (_ for _ in ()).throw(RuntimeError("no kernel image")), lambda *args: None)
    monkeypatch.setitem(flash_attention.IMPLEMENTATIONS, "sdpa", wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(flash_attention.IMPLEMENTATIONS, "hub", failing)  # type: ignore[arg-type]
    aborting = Implementation(lambda *args: (_ for _ in ()).throw(CompileError("SIGABRT")), lambda *args: None)
    monkeypatch.setitem(flash_attention.IMPLEMENTATIONS, "triton", aborting)  # type: ignore[arg-type]
    result = cli("tune", "attention", *SMALL)
    assert "not run: sdpa: its output is wrong" in result.stdout
    assert "not run: hub: RuntimeError: no kernel image" in result.stdout
    assert "not run: triton: CompileError: SIGABRT" in result.stdout
    assert all(one.names == ("eager",) for one in orders_of(devices.probe("cpu")))


@pytest.mark.parametrize("text", ["", "0", "64,", "a", "-1", "1.5"])
def test_lengths_that_are_no_numbers_are_refused(cli: Cli, text: str) -> None:
    result = cli("tune", "attention", "--lengths", text)
    assert result.exit_code == 2
    assert "is no list of positive numbers" in result.stderr
