"""8-bit floats: rows at the nearest codes, in both forms; their products; which GPU takes which form, and what is
refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.activation.quantize_rows import quantize_rows
from accelpatch.kernels.ops.linear import gemm_fp8 as ops
from accelpatch.kernels.ops.linear import w8a8_linear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.linear.gemm_fp8 import gated_fp8, gemm_fp8
from accelpatch.kernels.triton import launch
from tests.support.fp8 import FORMS, between, codes, numbers
from tests.support.parity import bits, name, strided, transposed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FN, FNUZ = FP8


@FORMS
def test_every_number_is_its_own_code(form: torch.dtype) -> None:
    """A row whose largest magnitude is the form's has the factor 1."""
    values = numbers(form)[None]
    q, scale = quantize_rows(values, None, form)
    assert scale.item() == 1
    assert torch.equal(codes(q)[0], codes(values.to(form))[0])


@FORMS
def test_between_two_numbers_the_nearest_counts_and_of_a_tie_the_even_one(form: torch.dtype) -> None:
    values, due = between(form)
    q, _ = quantize_rows(values[None], None, form)
    assert torch.equal(q[0].float(), due)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_codes_are_the_nearest_and_the_largest_is_the_form_s(form: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(2)).to(dtype)
    q, scale = quantize_rows(x, None, form)
    most, largest = x.float().abs().amax(1, keepdim=True), rows.LARGEST[form]
    assert torch.equal(scale, most / torch.full_like(most, largest))
    exact, every = (x.float() * (torch.full_like(most, largest) / most)).double(), numbers(form).double()
    assert torch.equal((exact - q.double()).abs(), exact[..., None].sub(every).abs().amin(-1))
    assert q.float().abs().amax(1).tolist() == [largest] * 9


@FORMS
def test_what_is_static_saturates(form: torch.dtype) -> None:
    largest = rows.LARGEST[form]
    x = torch.tensor([[largest * 1.01, -largest * 99.0, 1e38, 1.0, -(2.0**-20)]])
    q, scale = quantize_rows(x, torch.ones(1), form)
    assert (q.float().tolist()[0][:4], scale.item()) == ([largest, -largest, largest, 1], 1)


@FORMS
def test_rows_of_zeros_and_of_values_that_are_not_finite(form: torch.dtype) -> None:
    x = torch.randn(6, 33, generator=torch.Generator().manual_seed(2))
    x[1], x[2], x[3, 4], x[4, 0] = 0, x[2] * 2.0**-125, math.nan, -math.inf
    q, scale = quantize_rows(x, None, form)
    assert not codes(q)[1:5].any(), "zeros, none of them negative"
    assert scale.flatten().isnan().tolist() == [False, False, False, True, True, False]
    assert scale.flatten()[1:3].tolist() == [0, 0]
    q, scale = quantize_rows(torch.tensor([[2.0**-119, -(2.0**-119)]]), None, form)
    assert (q.float().abs().amax(), scale.item() > 0) == (rows.LARGEST[form], True)


@FORMS
def test_the_number_of_rows_and_the_strides_change_nothing(form: torch.dtype) -> None:
    x = torch.randn(129, 65, generator=torch.Generator().manual_seed(4))
    q, scale = quantize_rows(x, None, form)
    for m in (0, 1, 2, 7, 64):
        some, held = quantize_rows(x[:m], None, form)
        assert torch.equal(codes(some), codes(q[:m]))
        assert torch.equal(held, scale[:m])
    for view in (strided, transposed):
        assert torch.equal(codes(quantize_rows(view(x), None, form)[0]), codes(q))


def given(m: int, n: int, k: int, form: torch.dtype = FN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = ((60 * torch.randn(size, k, generator=generator)).clamp(-240, 240).to(form) for size in (m, n))
    row, column = (torch.rand(size, generator=generator) / 99 for size in (m, n))
    return a, b, row, column


@FORMS
@pytest.mark.parametrize("m", [0, 1, 2, 7, 129])
def test_on_a_cpu_sums_are_exact(m: int, form: torch.dtype) -> None:
    a, b, row, column = given(m, 33, 11008, form)
    y = gemm_fp8(a, b, row, column, None, torch.float32)
    due = (a.double() @ b.double().T) * (row.double()[:, None] * column.double())
    assert torch.equal(y, due.float())
    rows_alone = [gemm_fp8(a[i : i + 1], b, row[i : i + 1], column, None, torch.float32) for i in range(min(m, 3))]
    assert torch.equal(torch.cat([y[:0], *rows_alone]), y[:3])


def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not() -> None:
    q, scale = torch.randn(5, 64).to(FN), torch.rand(5, 1)
    x = torch.randn(3, 64)
    x[1, 7] = math.inf
    y = w8a8_linear.w8a8_linear(x, q, scale)
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert y[::2].isfinite().all()


WRONG: dict[str, tuple[Any, ...]] = {
    "two forms": (torch.zeros(2, 3).to(FN), torch.zeros(4, 3).to(FNUZ), torch.ones(2), torch.ones(4), None),
    "integers": (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(4, 3).to(FN), torch.ones(2), torch.ones(4), None),
    "K that differs": (torch.zeros(2, 3).to(FN), torch.zeros(4, 5).to(FN), torch.ones(2), torch.ones(4), None),
    "no scale a row": (torch.zeros(2, 3).to(FN), torch.zeros(4, 3).to(FN), torch.ones(1), torch.ones(4), None),
    "bias": (torch.zeros(2, 3).to(FN), torch.zeros(4, 3).to(FN), torch.ones(2), torch.ones(4), torch.ones(3)),
}


@pytest.mark.parametrize("args", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(KernelError, match="gemm_fp8: "):
        gemm_fp8(*args, torch.float32)


def test_what_else_is_refused() -> None:
    with pytest.raises(KernelError, match="no halves"):
        gated_fp8(*given(2, 5, 16), None, "silu", torch.float32)
    with pytest.raises(KernelError, match="a static scale is for int8"):
        w8a8_linear.w8a8_linear(torch.ones(2, 3), torch.ones(4, 3).to(FN), torch.ones(4, 1), torch.ones(1))
    with pytest.raises(KernelError, match="form is one of"):
        quantize_rows(torch.ones(2, 3), None, torch.float8_e5m2)


TAKES = {"sm_89": FN, "sm_90": FN, "sm_100": FN, "gfx942": FNUZ, "gfx950": FN}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("arch", TAKES)
def test_a_gpu_takes_the_form_of_its_arch_and_refuses_the_other(arch: str) -> None:
    device, form = KNOWN[arch], TAKES[arch]
    (other,) = {*FP8} - {form}
    assert device.fp8 == fp8_name(form)
    spec, planted = (ops.of_shape(2048, 4096, 4096, torch.bfloat16, one) for one in (form, other))
    assert dispatch.choose("gemm_fp8", spec, device) == "scaled_mm"
    for implementation in dispatch.kernel("gemm_fp8").implementations:
        reason = dispatch.why_not("gemm_fp8", implementation, planted, device)
        assert reason is not None
        assert reason == f"its 8-bit floats are {fp8_name(form)}, not {fp8_name(other)} ({arch})"
    linear = w8a8_linear.of_shape(64, 64, torch.bfloat16, form=other)
    gated = replace(planted, op="gated_fp8", options={**planted.options, "activation": "silu"})
    for refused in (planted, gated, linear):
        with pytest.raises(KernelError, match=rf"its 8-bit floats are {fp8_name(form)}, not"):
            dispatch.choose(refused.op, refused, device)
    for op, wrong in (
        ("quantize_rows", rows.of_shape(64, torch.bfloat16, form=other)),
        ("w8a8_linear", linear),
    ):
        assert f"its 8-bit floats are {fp8_name(form)}" in str(dispatch.why_not(op, "triton", wrong, device))
    assert f"its 8-bit floats are {fp8_name(form)}" in str(dispatch.why_not("w8a8_linear", "hip", wrong, device))
    layer = FusedLinear(W8A8Rows(torch.zeros(64, 64).to(other), torch.ones(64, 1)))
    assert f"its 8-bit floats are {fp8_name(form)}" in str(layer.why_not(torch.bfloat16, device))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("arch", ["gfx90a", "sm_80", "gfx1100"])
def test_a_gpu_without_a_unit_for_them_has_torch(arch: str) -> None:
    spec = ops.of_shape(2048, 4096, 4096, torch.bfloat16)
    assert dispatch.choose("gemm_fp8", spec, KNOWN[arch]) == "torch"
    assert "its matrix unit has no 8-bit floats" in str(dispatch.why_not("gemm_fp8", "triton", spec, KNOWN[arch]))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "m, n, k, dtype, bias, chosen",
    [
        (2048, 4096, 4096, torch.bfloat16, None, "scaled_mm"),
        (65, 4096, 4096, torch.bfloat16, torch.bfloat16, "scaled_mm"),
        (64, 4096, 4096, torch.bfloat16, None, "triton"),
        (2048, 4096, 4096, torch.float16, None, "triton"),
        (2048, 4096, 4096, torch.bfloat16, torch.float32, "triton"),
        (2048, 4104, 4096, torch.bfloat16, None, "triton"),
        (2048, 4096, 4104, torch.bfloat16, None, "triton"),
        (0, 4096, 4096, torch.bfloat16, None, "triton"),
        (2048, 4096, 4096, torch.float64, None, "torch"),
    ],
    ids=["prompt", "bias", "few", "float16", "float32 bias", "odd N", "odd K", "none", "float64"],
)
def test_who_runs_which_product(
    m: int, n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None, chosen: str
) -> None:
    spec = ops.of_shape(m, n, k, dtype, bias=bias)
    assert dispatch.choose("gemm_fp8", spec, KNOWN["sm_90"]) == chosen
    assert dispatch.choose("gemm_fp8", spec, probe("cpu")) == "torch"


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "m, n, k, dtype, bias, names",
    [
        (2000, 1024, 4096, torch.bfloat16, None, ["scaled_mm", "triton", "operations"]),
        (65, 96, 272, torch.bfloat16, torch.bfloat16, ["scaled_mm", "triton", "operations"]),
        (64, 1024, 4096, torch.bfloat16, None, ["operations"]),
        (1, 96, 272, torch.bfloat16, torch.bfloat16, ["operations"]),
        (300, 1024, 4096, torch.float16, None, ["triton", "operations"]),
        (300, 200, 130, torch.bfloat16, None, ["triton", "operations"]),
        (300, 1024, 4096, torch.bfloat16, torch.float32, ["triton", "operations"]),
    ],
    ids=["prompt", "bias", "few", "one", "float16", "odd", "float32 bias"],
)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_who_runs_a_product_with_its_gate(
    m: int, n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None, names: list[str], arch: str
) -> None:
    plain = ops.of_shape(m, n, k, dtype, TAKES[arch], bias=bias)
    spec = replace(plain, op="gated_fp8", options={**plain.options, "activation": "silu"})
    order = dispatch.order(spec.op, spec, KNOWN[arch])
    able = [one for one in order if dispatch.why_not(spec.op, one, spec, KNOWN[arch]) is None]
    assert able == names
    # what is forced is forced for the product that it is made of too
    assert "scaled_mm" not in able or dispatch.why_not(plain.op, "scaled_mm", plain, KNOWN[arch]) is None


def test_without_triton_torch_has_few_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: False)
    spec = ops.of_shape(16, 4096, 4096, torch.bfloat16)
    gated = replace(spec, op="gated_fp8", options={**spec.options, "activation": "silu"})
    assert dispatch.choose(spec.op, spec, KNOWN["sm_90"]) == "scaled_mm"
    assert dispatch.choose(gated.op, gated, KNOWN["sm_90"]) == "operations"  # that product, then the gate


@FORMS
def test_a_launch_names_the_library_of_its_form(form: torch.dtype) -> None:
    weight = W8A8Rows(torch.zeros(16, 32).to(form), torch.ones(16, 1))
    launched = weight.launch()
    assert (launched.function, launched.variant, launched.offset) == ("gemv_w8a8_fp8", fp8_name(form), None)
    assert launched.prefetchable
    assert weight.format != W8A8Rows(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1)).format


def test_the_gate_behind_is_the_gate_of_both_halves() -> None:
    args = given(7, 34, 130)
    gate, up = gemm_fp8(*args, None, torch.float32).chunk(2, dim=-1)
    y = gated_fp8(*args, None, "silu", torch.float32)
    assert torch.equal(bits(y), bits(torch.nn.functional.silu(gate) * up))
