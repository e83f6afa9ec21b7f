"""W8A8 of 8-bit floats by the HIP kernel on the GPU that is here: against float64, and a row's bits at any M."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.compiling.gpu_libraries import FP8
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.spec import Spec
from tests.support import w8a8_fp8_checks as checks
from tests.support.hip_gemv import Launched, Packed
from tests.support.parity import bits, name, poisoned, strided
from tests.support.w8a8_fp8_checks import Due, reference, wrong

HERE = torch.cuda.is_available()
FACTS = probe("cuda").facts if HERE else None
FORM = (FACTS and FACTS.fp8) or "e4m3fn"  # of this GPU
OTHER = next(form for form in list(FP8) if form != FORM)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use"),
    pytest.mark.skipif(HERE and not (FACTS and FACTS.fp8), reason="its matrix unit has no 8-bit floats"),
]
CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


def weight(n: int, k: int, static: bool = False) -> Packed:
    return checks.weight(FORM, n, k, static).to("cuda")


def launched(p: Packed, x: Tensor, **rest: Any) -> Tensor:
    """By the binding, into memory that holds NaN."""
    args = WeightArguments("gemv_w8a8_fp8", p.n, p.k, p.w, None, p.scale, p.offset, variant=FORM)
    with poisoned():
        return binding.launch(args, x, **rest)


@BOTH
@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize(
    "n, k",
    [(72, 576), (4096, 4096), (11008, 4096), (22016, 4096), (4096, 11008), (72, 11008), (4096, 14336), (32000, 4096)],
)
def test_against_float64(n: int, k: int, dtype: torch.dtype, static: bool) -> None:
    torch.manual_seed(0)
    packed, x = weight(n, k, static), torch.randn(8, k, device=CUDA, dtype=dtype)
    bias = torch.randn(n, device=CUDA, dtype=dtype)
    due = reference(packed, x, {"bias": bias})
    whole = launched(packed, x, bias=bias)
    for m in range(1, 9):
        y = launched(packed, x[:m], bias=bias)
        assert wrong(y, Due(due.y[:m], due.bound[:m])) == "", m
        assert torch.equal(bits(y), bits(whole[:m])), m
        assert torch.equal(bits(launched(packed, x[-m:], bias=bias)), bits(whole[-m:])), m


@BOTH
def test_random_shapes(static: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    for seed in range(200):
        m, n, k = (int(torch.randint(1, most, (1,), generator=draw)) for most in (9, 300, 3000))
        packed, x = weight(n, k, static), torch.randn(m, k, device=CUDA, dtype=HALVES[seed % 2])
        assert wrong(launched(packed, x), reference(packed, x, {})) == "", (m, n, k)


@BOTH
@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("form", list(FP8))
def test_norms_gates_residuals_strides_and_values_that_are_not_finite(
    form: str, dtype: torch.dtype, static: bool
) -> None:
    """Of the other form too, which portable code makes."""
    torch.manual_seed(0)
    assert checks.check_w8a8_fp8(Launched(), form, dtype, static, "cuda") == []


@pytest.mark.parametrize("form", list(FP8))
def test_every_code_and_every_float(form: str) -> None:
    assert checks.check_every_code(Launched(), form, "cuda") == []
    assert checks.check_every_float(Launched(), form, "cuda") == []


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("form", list(FP8))
def test_every_value_becomes_the_float_of_the_formula(form: str, dtype: torch.dtype) -> None:
    assert checks.check_scaled(Launched(), form, dtype, "cuda") == []


@pytest.mark.parametrize("form", list(FP8))
def test_sums_are_float32(form: str) -> None:
    torch.manual_seed(0)
    assert checks.check_large_sums(Launched(), form, "cuda") == []


def test_views() -> None:
    torch.manual_seed(0)
    packed = weight(33, 192)
    for m in (1, 5, 8):
        x = torch.randn(m, 192, device=CUDA, dtype=torch.bfloat16)
        assert torch.equal(bits(launched(packed, strided(x))), bits(launched(packed, x)))


def test_no_rows_and_more_than_eight() -> None:
    torch.manual_seed(0)
    packed, x = weight(100, 576), torch.randn(64, 576, device=CUDA, dtype=torch.bfloat16)
    assert launched(packed, x[:0]).shape == (0, 100)
    y = launched(packed, x)
    assert wrong(y, reference(packed, x, {})) == ""
    assert torch.equal(bits(y[8:16]), bits(launched(packed, x[8:16])))


def test_the_other_form_is_refused() -> None:
    spec = Spec("linear", {"M": 1, "N": 64, "K": 64}, torch.bfloat16)
    assert binding.why_not(spec, probe(CUDA), "gemv_w8a8_fp8", FORM) is None
    assert f"its 8-bit floats are {FORM}, not {OTHER}" in str(
        binding.why_not(spec, probe(CUDA), "gemv_w8a8_fp8", OTHER)
    )


@BOTH
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_a_captured_step_whose_launches_overlap(m: int, static: bool) -> None:
    """Gate and up, then down: over and over, into memory that holds NaN."""
    torch.manual_seed(0)
    gate_up, down = weight(22016, 4096, static), weight(4096, 11008, static)
    x = torch.randn(m, 4096, device=CUDA, dtype=torch.bfloat16)

    def by(p: Packed) -> Callable[..., Tensor]:
        args = WeightArguments("gemv_w8a8_fp8", p.n, p.k, p.w, None, p.scale, p.offset, variant=FORM)
        return lambda *given, **rest: binding.launch(args, *given, **rest)

    def step() -> Tensor:
        return by(down)(by(gate_up)(x, activation="silu_gate"), residual=x)

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), binding.weight_prefetch():
        ys = [step() for _ in range(4)]
    for _ in range(50):
        for y in ys:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(y), bits(want)) for y in ys)
    middle = by(gate_up)(x, activation="silu_gate")
    assert wrong(middle, reference(gate_up, x, {"activation": "silu_gate"})) == ""
    assert wrong(want, reference(down, middle, {"residual": x})) == ""
