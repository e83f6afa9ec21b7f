"""examples/jit: each runs in the emulator, for every arch, against torch; and is in the gate's table."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples" / "jit"
ARCHS = ("gfx90a", "gfx942", "gfx950")


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_it_runs_as_its_first_lines_say(name: str) -> None:
    example(name)["main"]("emulate")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows, depth", [(1, 1), (3, 77), (5, 512), (2, 1000), (4, 1030)])
def test_gemv_of_any_depth(rows: int, depth: int, arch: str) -> None:
    torch.manual_seed(depth)
    w, x = torch.randn(rows, depth).bfloat16(), torch.randn(depth).bfloat16()
    made = example("gemv")["multiply"](w, x, "emulate", arch)
    exact = w.double() @ x.double()
    ours, theirs = ((one.double() - exact).abs().max() for one in (made, w @ x))
    assert ours <= 2 * theirs + exact.abs().max() * 2**-8


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows, width", [(1, 1), (2, 300), (1, 1024)])
def test_norm_of_any_width(rows: int, width: int, arch: str) -> None:
    torch.manual_seed(width)
    held, x, weight = example("rms_norm"), torch.randn(rows, width).bfloat16(), torch.rand(width).bfloat16()
    made = held["norm"](x, weight, device="emulate", arch=arch)
    torch.testing.assert_close(made, held["reference"](x, weight), rtol=2**-7, atol=0)


def test_gemv_is_emulated_in_five_seconds() -> None:
    multiply, w, x = example("gemv")["multiply"], torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    start = time.perf_counter()
    multiply(w, x, "emulate")
    assert time.perf_counter() - start < 5


def test_the_gate_knows_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    gate = runpy.run_path(str(ROOT / "scripts" / "jit_gate.py"))
    assert sorted(name for name, _ in gate["kernels"]()) == sorted(gate["VALUES"])
    for name in [name for name in sys.modules if name == "gates" or name.startswith("gates.")]:
        del sys.modules[name]
