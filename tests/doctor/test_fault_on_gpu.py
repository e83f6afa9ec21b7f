"""A kernel that writes past the end of its tensor, planted on the device, is found by `accelpatch doctor fault`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch.doctor import fault
from tests.cli.conftest import environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROGRAM = """\
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def in_bounds(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit
def past_the_end(x, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + n + place, 1.0)


def main():
    x = torch.zeros(128, device="cuda")
    y = torch.zeros(128, device="cuda")
    in_bounds[(1,)](x, BLOCK=128)
    past_the_end[(1,)](x, int(sys.argv[1]), BLOCK=128)
    in_bounds[(1,)](y, BLOCK=128)
    torch.cuda.synchronize()
    print("sum", float(y.sum()))


main()
"""
FAR, NEAR = str(1 << 40), "128"


def found(folder: Path, offset: str, *options: str) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(PROGRAM)
    words = [sys.executable, "-m", "accelpatch", "doctor", "fault", "--json", "--timeout", "400", *options]
    words += ["--out", str(folder / "run"), "--", sys.executable, str(script), offset]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    print(done.stdout, done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(document["faults"] or document["status"])
    return document


def test_by_blocking_launches(tmp_path: Path) -> None:
    document = found(tmp_path, FAR, "--no-tool")
    first = document["faults"][0]
    assert first["kernel"] == "past_the_end"
    assert "past_the_end[(1,)](x, int(sys.argv[1]), BLOCK=128)" in first["launch"][0]
    assert first["source"].startswith(f"{tmp_path / 'script.py'}:1")
    assert any("past_the_end" in one for one in document["code"])


def test_without_a_fault(tmp_path: Path) -> None:
    document = found(tmp_path, "0", "--no-tool")
    assert (document["faults"], document["status"]) == ([], 0)


@pytest.mark.skipif(fault.sanitizer() is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("offset", [pytest.param(FAR, id="far"), pytest.param(NEAR, id="just past the end")])
def test_by_compute_sanitizer(tmp_path: Path, offset: str) -> None:
    document = found(tmp_path, offset)
    if unable := [one for one in document["notes"] if "could not start" in one]:
        pytest.skip(unable[0])
    first = document["faults"][0]
    assert first["tool"] == "compute-sanitizer"
    assert first["kernel"] == "past_the_end"
    line = PROGRAM.splitlines().index("    tl.store(x + n + place, 1.0)") + 1
    assert first["source"].endswith(f"script.py:{line}")
    assert "write" in first["kind"]
    assert first["threads"].startswith("thread (")
