"""8-bit floats on the GPU that is here: every implementation by the float rule, and a patched model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.ops.activation.quantize_rows import quantize_rows
from accelpatch.kernels.ops.linear import gemm_fp8 as ops
from accelpatch.kernels.ops.linear.w8a8_linear import w8a8_linear
from tests.support.parity import assert_parity, name, strided
from tests.support.tiny import CAUSAL, VOCABULARY

HERE = torch.cuda.is_available()
FORM_NAME = probe("cuda").fp8 if HERE else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use"),
    pytest.mark.skipif(HERE and FORM_NAME is None, reason="its matrix unit has no 8-bit floats"),
]
CUDA = torch.device("cuda")
FORM = FP8[fp8_name(FP8[1]) == FORM_NAME]
(OTHER,) = {*FP8} - {FORM}
HALVES = (torch.bfloat16, torch.float16)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def made(m: int, n: int, k: int, dtype: torch.dtype, bias: bool = False, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of gemm_fp8; x has channels and values far above the others."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    x, w = (torch.randn(size, k, generator=generator, device=CUDA) for size in (m, n))
    x[:, : k // 512] *= 30
    x[:, 0] += 50
    (a, row), (b, column) = quantize_rows(x, None, FORM), quantize_rows(w / k**0.5, None, FORM)
    beside = torch.randn(n, generator=generator, device=CUDA, dtype=dtype) if bias else None
    return a, b, row.flatten(), column.flatten(), beside, dtype


def able(op: str, args: tuple[Any, ...]) -> list[str]:
    spec = dispatch.kernel(op).spec(*args)
    return [one for one in dispatch.kernel(op).implementations if dispatch.why_not(op, one, spec, probe(CUDA)) is None]


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("m", [0, 1, 2, 7, 16, 17, 33, 64, 65, 129, 300, 2000])
def test_every_implementation_by_the_float_rule(m: int, dtype: torch.dtype) -> None:
    for n, k in ((512, 4096), (520, 11008), (48, 272), (33, 130), (7, 66)):
        for bias in (False, True):
            args = made(m, n, k, dtype, bias)
            for one in able("gemm_fp8", args):
                assert_parity("gemm_fp8", args, one)


def test_torch_s_product_runs_where_it_can() -> None:
    assert able("gemm_fp8", made(2000, 512, 4096, torch.bfloat16, True))[:2] == ["scaled_mm", "triton"]


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("m", [1, 64, 65, 300, 2000])
def test_the_gate_by_the_float_rule(m: int, dtype: torch.dtype) -> None:
    for n, k in ((1024, 4096), (96, 272), (200, 130)):
        for activation in ("silu", "gelu_tanh"):
            *held, last = made(m, n, k, dtype, n == 96)
            args = (*held, activation, last)
            torch_s = dtype == torch.bfloat16 and n % 16 == 0 and k % 16 == 0
            tiles = ["scaled_mm", "triton"] if torch_s else ["triton"]
            assert able("gated_fp8", args) == [*tiles, "operations"]
            for one in able("gated_fp8", args):
                assert_parity("gated_fp8", args, one)


def test_random_shapes() -> None:
    rng = random.Random(1)
    for seed in range(200):
        m, n, k = rng.choice((1, 5, 9, 40, 70, 200)), rng.randint(1, 300), rng.randint(1, 1500)
        args = made(m, n, k, HALVES[seed % 2], seed % 3 == 0, seed)
        for one in able("gemm_fp8", args):
            assert_parity("gemm_fp8", args, one)


def test_views() -> None:
    args = made(65, 48, 272, torch.bfloat16, True)
    viewed = tuple(strided(one) if isinstance(one, Tensor) and one.dtype not in FP8 else one for one in args)
    gaps = tuple(
        torch.cat([one, one], 1)[:, :272] if isinstance(one, Tensor) and one.dtype in FP8 else one for one in viewed
    )
    for one in able("gemm_fp8", args):
        with dispatch.forced(one):
            assert torch.equal(ops.gemm_fp8(*gaps), ops.gemm_fp8(*args)), one


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 64, 129])
def test_a_linear_layer_by_each_path(m: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(m)
    x = torch.randn(m, 576, generator=generator, device=CUDA, dtype=dtype)
    x[0, 5] = 40
    q, scale = quantize_rows(torch.randn(200, 576, generator=generator, device=CUDA), None, FORM)
    args = (x, q, scale, None, torch.randn(200, generator=generator, device=CUDA, dtype=dtype))
    names = able("w8a8_linear", args)
    assert ("hip" in names) == (m <= 64)
    for one in names:
        assert_parity("w8a8_linear", args, one)
    x[-1, 3] = float("inf")
    for one in names:
        with dispatch.forced(one):
            y = w8a8_linear(*args)
        assert y[-1].isnan().all()
        assert y[:-1].isfinite().all()


def test_the_other_form_is_refused() -> None:
    a, b, *rest = made(70, 64, 64, torch.bfloat16)
    with pytest.raises(KernelError, match=rf"its 8-bit floats are {fp8_name(FORM)}, not {fp8_name(OTHER)}"):
        ops.gemm_fp8(a.view(OTHER), b.view(OTHER), *rest)
    with pytest.raises(KernelError, match="its 8-bit floats are"):
        w8a8_linear(torch.ones(1, 64, device=CUDA, dtype=torch.bfloat16), b.view(OTHER), torch.ones(64, 1, device=CUDA))


@pytest.mark.parametrize("name_", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_a_patched_model_and_the_way_back(name_: str, dtype: torch.dtype) -> None:
    changes = SIZES if name_ != "gpt2" else {"n_embd": 256, "n_head": 4}
    model: Any = CAUSAL[name_].make(dtype, **changes).cuda()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ran = dispatch.calls.copy()
    accelpatch.patch(model, "fp8")
    report = model.accelpatch.report()
    assert report.verification.failures == []
    taken = [site for site in report.sites if site.replacer == "w8a8_fp8"]
    assert taken
    assert {site.kernel for site in taken} == {"hip"}
    ids = torch.randint(2, VOCABULARY, (1, 9), device=CUDA)
    assert model.generate(ids, max_new_tokens=8, do_sample=False).shape == (1, 17)
    long = torch.randint(2, VOCABULARY, (2, 60), device=CUDA)
    with torch.inference_mode():
        assert model(long).logits.isfinite().all()
    counted = dispatch.calls - ran
    assert counted["fused_linear", "hip"] or counted["w8a8_linear", "hip"]
    assert any(op == "gemm_fp8" and one in ("scaled_mm", "triton") for op, one in counted), counted
    accelpatch.unpatch(model)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
