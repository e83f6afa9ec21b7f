"""examples/jit: each runs in the emulator, for every arch, against torch; and is in the gate's table."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import accelpatch
from accelpatch.device import KNOWN, probe
from accelpatch.kernels.spec import Spec
from tests.support import plugins

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples" / "jit"
ARCHS = ("gfx90a", "gfx942", "gfx950")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a plugin adds is taken out again."""
    yield
    plugins.forget()


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


# gemv_linear is run by test_the_gemv_in_a_model
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"gemv_linear"}))
def test_it_runs_as_its_first_lines_say(name: str) -> None:
    example(name)["main"]("emulate")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows, depth", [(1, 1), (3, 77), (5, 512), (2, 1000), (4, 1030), (1, 4616), (1, 2051)])
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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind, m, n, k", [("bf16", 3, 65, 104), ("i8", 33, 2, 400)])
def test_products_of_matrices(kind: str, m: int, n: int, k: int, arch: str) -> None:
    """Rows that are no multiple of a tile, K of an odd number of tiles and a part of one."""
    torch.manual_seed(k)
    multiply = example("gemm")["multiply_matrices"]
    if kind == "bf16":
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        made = multiply(a, b, "emulate", arch)
        torch.testing.assert_close(made, (a.double() @ b.double().T).float(), rtol=1e-5, atol=1e-4)
    else:
        a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
        assert torch.equal(multiply(a, b, "emulate", arch), (a.double() @ b.double().T).int())


def test_rows_of_a_product_of_matrices_are_wide() -> None:
    with pytest.raises(ValueError, match="no multiple of 16 bytes"):
        example("gemm")["multiply_matrices"](torch.zeros(2, 7).bfloat16(), torch.zeros(2, 7).bfloat16(), "emulate")


def test_the_gemv_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    held = example("gemv_linear")
    model = held["main"]("emulate")
    report = model.accelpatch.report()
    taken = [site for site in report.sites if site.kernel == "jit_gemv"]
    assert len(taken) == 8
    assert all(site.kernel_error is not None for site in taken)
    rows: list[Any] = []
    multiply = held["multiply"]
    monkeypatch.setitem(held["jit_gemv"].__globals__, "multiply", lambda *of: (rows.append(of), multiply(*of))[1])
    with torch.no_grad():
        logits = model(torch.tensor([[7]])).logits
    assert len(rows) == 8
    accelpatch.unpatch(model)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([[7]])).logits, rtol=2**-5, atol=2**-6)


def test_the_gemv_s_limits_and_operands() -> None:
    held, cpu = example("gemv_linear"), probe("cpu")
    spec = Spec("float_linear", {"M": 5, "N": 4, "K": 8}, torch.bfloat16)
    assert "5 rows" in held["why_not"](spec, cpu)
    assert "for AMD" in held["why_not"](replace(spec, sizes={"M": 1}), KNOWN["sm_90"])
    assert held["why_not"](replace(spec, sizes={"M": 1}), KNOWN["gfx942"]) is None
    assert "not torch.float32" in held["why_not"](replace(spec, sizes={"M": 1}, dtype=torch.float32), cpu)
    x, w = torch.randn(2, 3, 40).bfloat16(), torch.randn(9, 88).bfloat16()[1:, 3:83:2]
    bias = torch.randn(8)
    torch.testing.assert_close(held["jit_gemv"](x[:, :1], w, bias), linear(x[:, :1], w, bias.bfloat16()))
    assert held["jit_gemv"](x[:0], w).shape == (0, 3, 8)


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
