"""The operations by the HIP kernels on the GPU that is here: the float rule, views, shapes, specials, bits, streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int3_tiles import Int3Tiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.spec import Case, in_precision
from accelpatch.quant import int3, int4
from tests.support.gemv_reference import wrong
from tests.support.parity import assert_parity, bits, name, poisoned, strided, transposed

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use")]
CUDA = torch.device("cuda")
INT3, INT4 = "tiled_int3_linear", "tiled_int4_linear"
OPS = ("float_linear", "compact_linear", "int8_linear", INT3, INT4, "fp8_linear")
HALVES = (torch.bfloat16, torch.float16)
PAIRS = [
    pytest.param(op, dtype, id=f"{op}-{name(dtype)}")
    for op in OPS
    for dtype in HALVES
    if (op, dtype) != ("compact_linear", torch.float16)  # its weight is bfloat16
]
GROUPED_INT8 = "int8 with groups"  # is torch's


def cases() -> list[Any]:
    found = [(op, case) for op in OPS for case in dispatch.kernel(op).cases()]
    return [pytest.param(op, case, id=f"{op}-{case.id}") for op, case in found]


def runs(op: str, args: tuple[Any, ...]) -> bool:
    return dispatch.why_not(op, "hip", dispatch.kernel(op).spec(*args), probe(CUDA)) is None


def chosen(op: str, args: tuple[Any, ...]) -> str:
    """The implementation for these arguments: the device library's, or another's for many rows."""
    name = dispatch.choose(op, dispatch.kernel(op).spec(*args), probe(CUDA))
    assert name.startswith("hip") or args[0].shape[:-1].numel() > binding.MAX_GEMV_ROWS, name
    return name


def made(op: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0, group: int = 64) -> tuple[Any, ...]:
    """Arguments of an operation on the GPU, with a bias; int4 in `group`s with offsets of a kind drawn by `seed`."""
    rng, generator = random.Random(seed), torch.Generator(CUDA).manual_seed(seed)
    x, bias = (torch.randn(*size, generator=generator, device=CUDA, dtype=dtype) for size in ((m, k), (n,)))
    w = torch.randn(n, k, generator=generator, device=CUDA) / k**0.5
    if op == "float_linear":
        return x, w.to(dtype), bias
    if op == "compact_linear":
        return x, *CompactTiles.pack(w.bfloat16()), bias
    if op == "int8_linear":
        return x, (w * 32 * k**0.5).clamp(-127, 127).to(torch.int8), torch.rand(n, 1, device=CUDA) / 100, bias
    if op == "fp8_linear":
        return x, (50 * k**0.5 * w).clamp(-240, 240).to(rng.choice(FP8)), torch.rand(n, 1, device=CUDA) / 100, bias
    if op == INT3:
        kind = rng.choice(({}, {"symmetric": True}, {"zero_point": True}))
        return x, *Int3Tiles.of(int3.quantize(w, group_size=group, **kind)), bias
    weight = int4.quantize(w, group_size=group, symmetric=rng.random() < 0.4)
    if weight.offset is not None and rng.random() < 0.5:
        weight = weight.replace(offset=torch.randint(0, 16, weight.scale.shape, device=CUDA))
    return x, *Tiles.pack(*weight), bias


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("op, case", cases())
def test_float_rule(op: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(torch.Generator().manual_seed(7), dtype, CUDA)
    if op == "compact_linear" and dtype != torch.bfloat16:
        assert not runs(op, args), "the weight is bfloat16"
        assert_parity(op, args)
    elif op == "int8_linear" and args[2].shape[1] > 1:
        assert not runs(op, args), GROUPED_INT8
        assert_parity(op, args)
    else:
        assert_parity(op, args, chosen(op, args))


@pytest.mark.parametrize("n, k", [(4096, 11008), (1, 65), (7, 2048), (32000, 576), (100, 4096)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_shapes_of_models(op: str, n: int, k: int) -> None:
    if op in (INT3, INT4) and k % 2:
        n, k = 2, 66 if op == INT4 else 72
    for m in (1, 8, 9, 65):
        args = made(op, m, n, k, torch.bfloat16, seed=m, group=64 if k % 64 == 0 else k)
        assert_parity(op, args, chosen(op, args))


@pytest.mark.parametrize("m", [9, 32, 64])
def test_many_tokens_are_the_librarys_own(m: int) -> None:
    """In groups of 128, where blocks form clusters; views and paired tiles too."""
    x, *rest = made("tiled_int4_linear", m, 96, 4096, torch.bfloat16, seed=m, group=128)
    if chosen("tiled_int4_linear", (x, *rest)) != "hip_gemm":
        pytest.skip("Triton's")
    both = Tiles(*rest[:-1]).pair()
    for one in (rest, [*both, rest[-1]], [*both.replace(n=48, part="up"), None]):
        assert_parity("tiled_int4_linear", (x, *one), "hip_gemm")
        assert_parity("tiled_int4_linear", (torch.cat([x, x], 1)[:, 4096:], *one), "hip_gemm")


@pytest.mark.parametrize("op", OPS)
def test_random_shapes(op: str) -> None:
    rng = random.Random(3)
    for seed in range(1000):
        m, n, group = rng.randint(1, 70), rng.randint(1, 300), rng.choice((32, 64, 128, 256, 512))
        k = group * rng.randint(1, 9) if op in (INT3, INT4) else rng.randint(1, 3000)
        dtype = torch.bfloat16 if op == "compact_linear" else HALVES[seed % 2]
        args = made(op, m, n, k, dtype, seed, group)
        assert_parity(op, args, chosen(op, args))


@pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
@pytest.mark.parametrize("op", OPS)
def test_views(op: str, view: Callable[[Tensor], Tensor]) -> None:
    args = made(op, 5, 33, 192, torch.bfloat16)
    plain = assert_parity(op, args, "hip")[0]
    eight_bits = [isinstance(value, Tensor) and value.element_size() == 1 for value in args]
    views = [
        view(value) if isinstance(value, Tensor) and not (op == "fp8_linear" and eight) else value
        for value, eight in zip(args, eight_bits, strict=True)
    ]
    assert torch.equal(bits(assert_parity(op, tuple(views), "hip")[0]), bits(plain))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("op, dtype", PAIRS)
def test_nan_and_infinity_come_through(op: str, dtype: torch.dtype, value: float) -> None:
    for seed in range(4):
        args = made(op, 5, 33, 192, dtype, seed)
        args[0][2, 17] = value
        with dispatch.forced("hip"):
            y = dispatch.kernel(op).op(*args)
        exact = dispatch.kernel(op).reference(*in_precision(args, torch.float64))
        assert torch.equal(y[2].isnan(), exact[2].isnan())
        assert torch.equal(y[2].sign().nan_to_num(), exact[2].sign().nan_to_num().to(dtype))
        assert bool(y[[0, 1, 3, 4]].isfinite().all())


@pytest.mark.parametrize("op, dtype", PAIRS)
def test_values_far_above_the_rest(op: str, dtype: torch.dtype) -> None:
    """A few channels a thousand times the others, as in language models: they share a block's power of two."""
    x, *rest = made(op, 5, 100, 1024, dtype)
    x[:, [5, 300, 301]] *= 1000
    x[3] *= 2.0**-10
    assert_parity(op, (x, *rest), "hip")


@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_whatever_m_is(op: str) -> None:
    x, *rest = made(op, 8, 100, 4096, torch.bfloat16)
    run = dispatch.kernel(op).op
    with poisoned(), dispatch.forced("hip"):
        whole = run(x, *rest)
        for m in (1, 2, 3, 5, 7, 8):
            assert torch.equal(bits(run(x[:m], *rest)), bits(whole[:m])), m
            assert torch.equal(bits(run(x[-m:], *rest)), bits(whole[-m:])), m
        with binding.weight_prefetch():
            assert torch.equal(bits(run(x, *rest)), bits(whole))


@pytest.mark.parametrize("op", OPS)
def test_captured_and_on_another_stream(op: str) -> None:
    args = made(op, 3, 100, 4096, torch.bfloat16)
    run, stream, graph = dispatch.kernel(op).op, torch.cuda.Stream(), torch.cuda.CUDAGraph()
    due = run(*args)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream), binding.weight_prefetch():
        y = run(*args)
    y.fill_(7)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(y), bits(due))
    assert torch.cuda.memory_allocated() == before


def test_prologue_and_epilogue() -> None:
    """RMSNorm of x, gate and up with SiLU, a residual: as the fused layers use the kernel."""
    x, w, bias = made("float_linear", 3, 200, 576, torch.bfloat16)
    gain, residual = torch.rand(576, device=CUDA).bfloat16() + 0.5, torch.randn(3, 100, device=CUDA).bfloat16()
    kind = {"norm": "rms", "norm_weight": gain, "bias": bias, "activation": "silu_gate", "residual": residual}
    y = binding.launch(WeightArguments("gemv", 200, 576, w), x, **kind)
    assert wrong(y, w, x, kind) == ""


def test_many_rows_and_wide_types_go_to_torch() -> None:
    x, w, bias = made("float_linear", 200, 64, 128, torch.bfloat16)
    ran = dispatch.calls["float_linear", "torch"]
    assert torch.equal(dispatch.kernel("float_linear").op(x, w, bias), functional.linear(x, w, bias))
    assert dispatch.calls["float_linear", "torch"] == ran + 1, "the choice by M is inside"
    assert not runs("float_linear", (x.float(), w.float(), None))
