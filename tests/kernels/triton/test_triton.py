"""Triton kernels: the float rule. bfloat16 is left out where the interpreter runs them, which cuts it off."""

from __future__ import annotations

import math
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.choice import STORED
from accelpatch.kernels.ops.activation.quantize_rows import form_why_not
from accelpatch.kernels.spec import Case
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, LOW, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import DTYPES, assert_parity, name, strided, transposed

pytestmark = needs_triton
RUNNING = tuple(dtype for dtype in DTYPES if not INTERPRETED or dtype != torch.bfloat16)
OF_TRITON = [op for op in dispatch.TABLE if "triton" in dispatch.kernel(op).implementations]
# gemv's takes sizes of large models alone: see test_weight_only_rows.py; attention: see test_flash_attention.py
ELSEWHERE = ("float_linear", "flash_attention")
OPS = tuple(op for op in OF_TRITON if dispatch.kernel(op).registered and op not in ELSEWHERE)
CASES = [(op, case) for op in OPS for case in dispatch.kernel(op).cases()]


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def fitting(op: str) -> Case:
    """A case that Triton takes; a product with its gate is none of few rows, and fp8 weights are e4m3fn."""
    return list(dispatch.kernel(op).cases())[{"gated_fp8": -1, "fp8_linear": 0}.get(op, 1)]


def made(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    return case.make(torch.Generator().manual_seed(7), dtype, DEVICE)


@here
@pytest.mark.parametrize("dtype", RUNNING, ids=name)
@pytest.mark.parametrize("op, case", CASES, ids=[f"{op}-{case.id}" for op, case in CASES])
def test_float_rule(op: str, case: Case, dtype: torch.dtype) -> None:
    args = made(case, dtype)
    if reason := dispatch.why_not(op, "triton", dispatch.kernel(op).spec(*args), probe(DEVICE)):
        pytest.skip(reason)
    assert_parity(op, args, "triton")


@here
@pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
@pytest.mark.parametrize("op", OPS)
def test_views(op: str, view: Any) -> None:
    args = fitting(op).make(torch.Generator().manual_seed(1), LOW, torch.device("cpu"))
    viewed = tuple(view(value).to(DEVICE) if isinstance(value, Tensor) else value for value in args)
    assert_parity(op, viewed, "triton")


@here
def test_the_halves_of_one_product() -> None:
    both = torch.randn(2, 3, 130, generator=torch.Generator().manual_seed(1)).to(DEVICE, LOW)
    gate, up = both.chunk(2, dim=-1)
    assert_parity("gated_activation", (gate, up, "silu"), "triton")


@here
@pytest.mark.parametrize("weight", RUNNING, ids=name)
@pytest.mark.parametrize("plus_one", [False, True], ids=["llama", "gemma"])
def test_mixed_dtypes(plus_one: bool, weight: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 65, generator=generator).to(DEVICE, LOW)
    residual = torch.randn(3, 65, generator=generator).to(DEVICE, torch.float32)
    scale = torch.randn(65, generator=generator).to(DEVICE, weight)
    (y,) = assert_parity("rmsnorm", (x, scale, 1e-6, plus_one), "triton")
    assert y.dtype == (LOW if plus_one else torch.promote_types(LOW, weight))
    assert_parity("add_rmsnorm", (x, residual, scale, 1e-6, plus_one), "triton")
    assert_parity("rmsnorm_add", (x, residual, scale, 1e-6, plus_one), "triton")


@here
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("op", ["rmsnorm", "add_rmsnorm", "rmsnorm_add", "add_layernorm", "gated_activation"])
def test_nan_and_infinity_come_out_where_the_reference_has_them(op: str, value: float) -> None:
    args = made(list(dispatch.kernel(op).cases())[1], torch.float32)
    args[0].view(-1)[3] = value
    with dispatch.forced("triton"):
        found: Any = dispatch.kernel(op).op(*args)
    due: Any = dispatch.kernel(op).reference(*args)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, due)), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf(), other.isinf())


def test_a_gpu_gets_triton_and_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for op in OPS:
        kernel = dispatch.kernel(op)
        case = fitting(op)
        spec = kernel.spec(*made(case, torch.bfloat16))
        gpu = next(KNOWN[arch] for arch in ("gfx942", "sm_90") if form_why_not(spec, KNOWN[arch]) is None)
        assert dispatch.choose(op, spec, gpu) in ("hip", "scaled_mm", "triton")
        assert dispatch.why_not(op, "triton", spec, gpu) is None
        plain = "operations" if kernel.composed else "torch"
        on_cpu = {"gemm_w8a8": ("int_mm",), "fp8_linear": STORED, "block_linear": STORED}.get(op, (plain,))
        assert dispatch.choose(op, spec, probe("cpu")) in on_cpu
        wide = kernel.spec(*made(case, torch.float64))
        if wide.dtype == torch.float64:  # int8 GEMMs have an output of their own
            assert dispatch.choose(op, wide, gpu) == plain


def test_without_an_early_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton before 3.4 has no names for it, and looks up all that a kernel has."""
    from triton.language.extra import cuda

    from accelpatch.kernels.triton import dependent_launch, launch

    assert dependent_launch.HERE
    with monkeypatch.context() as older:
        older.delattr(cuda, "gdc_wait")
        older.delattr(cuda, "gdc_launch_dependents")
        held = runpy.run_path(dependent_launch.__file__)
    assert not held["HERE"]
    assert not any("cuda" in held[name].fn.__code__.co_names for name in ("release", "wait"))
    hopper = KNOWN["sm_90"]
    monkeypatch.setattr(launch, "probe", lambda where: hopper)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 99))
    launch._dependent.cache_clear()
    assert launch.dependent(on_gpu) == (True, {"launch_pdl": True})
    launch._dependent.cache_clear()
    monkeypatch.setattr(launch, "_available", lambda: False)
    assert launch.dependent(on_gpu) == (False, {})
    launch._dependent.cache_clear()
