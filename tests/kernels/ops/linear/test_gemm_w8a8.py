"""int8 products: exact integers on random shapes, one rounding, the five functions of SmoothQuant, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.linear import gemm_w8a8 as ops
from accelpatch.kernels.ops.linear import w8a8_linear
from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8
from tests.support.parity import strided

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = (0, 1, 2, 7, 16, 17, 33, 64, 65, 129, 300)
HERE = ("torch", "int_mm") if DEVICE.type == "cpu" else ("triton", "int_mm")


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=generator, device=generator.device).to(torch.int8)


def sums(a: Tensor, b: Tensor, name: str) -> Tensor:
    """The int32 sums by one implementation, as float32, in which those of small K are exact."""
    with dispatch.forced(name):
        return gemm_w8a8(a, b, 1.0, None, None, None, 1.0, None, "none", None, torch.float32)


def compare(count: int, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    for _ in range(count):
        m, n, k = rng.choice(ROWS), rng.randint(1, 300), rng.randint(1, 1000)
        a, b = integers(generator, m, k), integers(generator, n, k)
        a = strided(a) if rng.random() < 0.3 else a
        due = ops.accumulators(a, b)
        for name in HERE:
            if (
                dispatch.why_not("gemm_w8a8", name, ops.of_shape(m, n, k, torch.float32), dispatch.probe(DEVICE))
                is None
            ):
                assert torch.equal(sums(a, b, name).double(), due), (name, m, n, k)


def test_sums_are_exact() -> None:
    compare(200, 1)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_sums_are_exact_on_10_000_shapes() -> None:
    compare(10_000, 2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ops.OUTPUTS, ids=str)
@pytest.mark.parametrize("n", [512, 520, 513])
def test_prompts_of_large_models(n: int, dtype: torch.dtype) -> None:
    """Tiles that are loaded and stored by TMA, and those whose rows do not allow it; with all that comes behind."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    a, b = integers(generator, 2000, 4096), integers(generator, n, 4096)
    row, column = (torch.rand(size, device=DEVICE) / 99 for size in (2000, n))
    beside = torch.randn(2000, n, device=DEVICE)
    for d in (None, beside[0].contiguous(), beside):
        args = (a, b, 0.1, row, column, d, 0.5, None, "silu", beside, dtype)
        with dispatch.forced("triton"):
            y = gemm_w8a8(*args)
        wanted, unit = ops.reference(*args[:-1], torch.float64), 1 if dtype == torch.int8 else torch.finfo(dtype).eps
        wanted = wanted.clamp(-128, 127) if dtype == torch.int8 else wanted
        assert ((y.double() - wanted).abs() <= unit * wanted.abs().clamp(min=1) + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("m, half", [(65, 48), (2000, 512), (300, 100)])
def test_the_gate_inside_is_that_behind(m: int, half: int, bias: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(m, 256, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    q, scale = integers(generator, 2 * half, 256), torch.rand(2 * half, 1, device=DEVICE) / 999
    beside = torch.randn(2 * half, device=DEVICE, dtype=torch.bfloat16) if bias else None
    made = rows.QuantizedRows(*rows.quantize_rows(x), x.dtype)
    gate, up = w8a8_linear.of_rows(made, q, scale, beside).chunk(2, dim=-1)
    inside = w8a8_linear.of_rows(made, q, scale, beside, "silu")
    behind = torch.nn.functional.silu(gate) * up
    assert ((inside - behind).abs() <= 2**-6 * behind.abs() + 1e-3).all()


def test_sums_beyond_what_float32_adds_up() -> None:
    a, b = torch.full((3, 5000), 127, dtype=torch.int8), torch.full((2, 5000), 127, dtype=torch.int8)
    b[0, 0] = 126
    y = gemm_w8a8(a, b, 1.0, None, None, None, 1.0, torch.tensor([80_000_000, 80_000_000], dtype=torch.int32))
    assert torch.equal(y[0], torch.tensor([127 * 127 * 5000 - 127 - 80_000_000, 127 * 127 * 5000 - 80_000_000]).float())


def given(m: int = 5, n: int = 7, k: int = 66) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return integers(generator, m, k), integers(generator, n, k)


def due(a: Tensor, b: Tensor, d: Tensor, alpha: Any, beta: Any) -> Tensor:
    return alpha * (a.double() @ b.double().T) + beta * d.double()


BY_ROW, BY_COLUMN = torch.rand(5, 1) / 99, torch.rand(7) / 99


@pytest.mark.parametrize("d", [(7,), (5, 7)], ids=["vector", "matrix"])
@pytest.mark.parametrize("alpha", [0.004, BY_ROW, BY_COLUMN], ids=["number", "by row", "by column"])
@pytest.mark.parametrize("beta", [0.5, torch.rand(7)], ids=["number", "by column"])
def test_the_linear_functions(alpha: Any, beta: Any, d: tuple[int, ...]) -> None:
    a, b = given()
    beside = integers(torch.Generator().manual_seed(4), *d)
    wanted = due(a, b, beside, alpha, beta)
    made = ops.linear_abde_i8(a, b, beside, alpha, beta)
    assert made.dtype == torch.int8
    assert (made.double() - wanted.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4
    relu = ops.linear_relu_abde_i8(a, b, beside, alpha, beta)
    assert torch.equal(relu, made.clamp(min=0))
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        y = ops.linear_ab_i8_de_f32(a, b, beside.float(), alpha, beta, dtype=dtype)
        assert y.dtype == dtype
        assert ((y.double() - wanted).abs() <= close * wanted.abs() + 1e-5).all()


def test_the_batched_functions() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = integers(generator, 3, 4, 65), integers(generator, 3, 6, 65)
    wanted = 0.002 * ops.accumulators(a, b)
    assert (ops.bmm_abe_i8(a, b, 0.002).double() - wanted.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4
    assert torch.allclose(ops.bmm_ab_i8_e_f32(a, b, 0.002).double(), wanted, rtol=1e-6)


def test_ties_go_to_even_and_the_rest_saturates() -> None:
    a, b = (
        torch.tensor([[1], [3], [5], [-1], [-3], [127], [-128]], dtype=torch.int8),
        torch.ones(1, 1, dtype=torch.int8),
    )
    made = ops.linear_abde_i8(a, b, torch.zeros(1, dtype=torch.int8), 0.5, 1.0)
    assert made.flatten().tolist() == [0, 2, 2, 0, -2, 64, -64]
    assert ops.linear_abde_i8(a, b, torch.zeros(1, dtype=torch.int8), 9.0, 1.0).flatten().tolist()[-2:] == [127, -128]


def test_a_zero_point_is_corrected() -> None:
    a, b = given()
    d = torch.zeros(7)
    shifted = ops.linear_ab_i8_de_f32(a, b, d, 1.0, 1.0, zero_point=9)
    assert torch.equal(shifted.double(), (a.double() - 9) @ b.double().T)


@pytest.mark.parametrize("activation", ops.NAMES)
def test_activation_then_residual(activation: str) -> None:
    a, b = given()
    beside = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    args = (a, b, 0.003, None, None, torch.ones(7), 1.0, None, activation, beside, torch.float32)
    assert torch.allclose(gemm_w8a8(*args).double(), ops.reference(*args).double(), rtol=1e-5, atol=1e-5)


WRONG = {
    "floats": (torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.int8)),
    "K that differs": (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(4, 5, dtype=torch.int8)),
    "batches that differ": (torch.zeros(2, 2, 3, dtype=torch.int8), torch.zeros(3, 4, 3, dtype=torch.int8)),
    "no columns": (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(0, 3, dtype=torch.int8)),
}


@pytest.mark.parametrize("a, b", WRONG.values(), ids=WRONG)
def test_matrices_that_do_not_fit(a: Tensor, b: Tensor) -> None:
    with pytest.raises(KernelError, match="gemm_w8a8: "):
        gemm_w8a8(a, b, 1.0)


@pytest.mark.parametrize("name, value", [("d", torch.zeros(3)), ("d", torch.zeros(2, 2)), ("row_scale", torch.ones(3)),
                                         ("correction", torch.zeros(7)), ("activation", "tanh"),
                                         ("dtype", torch.int32)], ids=str)  # fmt: skip
def test_what_is_beside_must_fit(name: str, value: Any) -> None:
    with pytest.raises(KernelError, match="gemm_w8a8: "):
        gemm_w8a8(*given(), 1.0, **{name: value})


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rows_with_values_that_are_not_finite_are_nan_alone(static: bool) -> None:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(2))
    x[1, 5], x[2, 0] = float("nan"), float("inf")
    q, scale = rows.quantize_rows(x, torch.tensor([0.02]) if static else None)
    finite = scale.expand(4, 1).isfinite().flatten()
    assert finite.tolist() == [True, False, False, True]
    assert not q[1:3].any()


def test_the_largest_magnitude_is_127_and_zeros_stay() -> None:
    x = torch.randn(6, 77, generator=torch.Generator().manual_seed(3))
    x[2] = 0
    q, scale = rows.quantize_rows(x)
    assert q.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127]
    assert (q * scale - x).abs().max() <= scale.max() / 2 * (1 + 1e-5)
