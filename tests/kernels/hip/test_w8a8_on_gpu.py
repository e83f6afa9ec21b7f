"""W8A8 by the HIP kernel on the GPU that is here: the bits of Triton's operations, at any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.linear.w8a8_linear import w8a8_linear
from tests.support.hip_gemv import Launched
from tests.support.parity import bits, name, poisoned, strided, transposed
from tests.support.w8a8_checks import check_integers, check_large_sums, check_w8a8, reference, weight

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use")]
CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


def made(m: int, n: int, k: int, dtype: torch.dtype, static: bool, seed: int = 0) -> tuple[Any, ...]:
    """x, q, scale, input_scale and bias on the GPU."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    x, bias = (torch.randn(*size, generator=generator, device=CUDA, dtype=dtype) for size in ((m, k), (n,)))
    q = torch.randint(-127, 128, (n, k), generator=generator, device=CUDA, dtype=torch.int8)
    scale = (torch.rand(n, 1, generator=generator, device=CUDA) + 0.5) / (64 * k**0.5)
    return x, q, scale, torch.tensor([0.03], device=CUDA) if static else None, bias


def by(implementation: str, args: tuple[Any, ...]) -> Tensor:
    ran = dispatch.calls["w8a8_linear", implementation]
    with poisoned(), dispatch.forced(implementation):
        y: Tensor = w8a8_linear(*args)
    assert dispatch.calls["w8a8_linear", implementation] == ran + 1
    return y


@BOTH
@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("k", [576, 4096, 11008, 14336])
@pytest.mark.parametrize("n", [72, 4096, 32000])
def test_the_bits_of_the_operations(n: int, k: int, dtype: torch.dtype, static: bool) -> None:
    x, *rest = made(8, n, k, dtype, static)
    want = by("triton", (x, *rest))
    for m in range(1, 9):
        assert torch.equal(bits(by("hip", (x[:m], *rest))), bits(want[:m])), m
        assert torch.equal(bits(by("hip", (x[-m:], *rest))), bits(want[-m:])), m


@BOTH
def test_random_shapes(static: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    for seed in range(200):
        m, n, k = (int(torch.randint(1, most, (1,), generator=draw)) for most in (9, 300, 3000))
        args = made(m, n, k, HALVES[seed % 2], static, seed)
        assert torch.equal(bits(by("hip", args)), bits(by("triton", args))), (m, n, k)


@BOTH
@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_norms_gates_residuals_strides_and_values_that_are_not_finite(dtype: torch.dtype, static: bool) -> None:
    torch.manual_seed(0)
    assert check_w8a8(Launched(), dtype, static, "cuda") == []


@BOTH
@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_every_value_becomes_the_integer_of_the_operation(dtype: torch.dtype, static: bool) -> None:
    assert check_integers(Launched(), dtype, static, "cuda") == []


def test_sums_are_added_as_integers() -> None:
    torch.manual_seed(0)
    assert check_large_sums(Launched(), "cuda") == []


@pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
def test_views(view: Callable[[Tensor], Tensor]) -> None:
    for m in (1, 5, 8):
        args = made(m, 33, 192, torch.bfloat16, True)
        views = tuple(view(one) if isinstance(one, Tensor) else one for one in args)
        assert torch.equal(bits(by("hip", views)), bits(by("triton", args)))


def test_no_rows_and_more_than_eight() -> None:
    x, *rest = made(64, 100, 576, torch.bfloat16, False)
    assert by("hip", (x[:0], *rest)).shape == (0, 100)
    layer = FusedLinear(W8A8Rows(*rest[:3]), rest[3])
    assert torch.equal(bits(layer(x)), bits(by("triton", (x, *rest))))
    assert dispatch.choose("w8a8_linear", dispatch.kernel("w8a8_linear").spec(x, *rest), probe(CUDA)) == "triton"


@BOTH
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_a_captured_step_whose_launches_overlap(m: int, static: bool) -> None:
    """Gate and up, then down: over and over, into memory that holds NaN."""
    first, second = (weight(n, k, static) for n, k in ((22016, 4096), (4096, 11008)))
    gate_up, down = (
        FusedLinear(W8A8Rows(*(None if t is None else t.cuda() for t in (p.w, p.scale, p.offset))))
        for p in (first, second)
    )
    x = torch.randn(m, 4096, device=CUDA, dtype=torch.bfloat16)

    def step() -> Tensor:
        return down(gate_up(x, None, "silu"), None, None, x)

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
    middle = gate_up(x, None, "silu").cpu()
    assert torch.equal(want.cpu(), reference(second, middle, {"residual": x.cpu()}))
