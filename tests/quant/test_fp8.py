"""fp8 weights: nearest codes by brute force, both forms, zero rows, the ends of the range, what is refused."""

from __future__ import annotations

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.quant import fp8
from accelpatch.quant.formats import dequantize
from tests.support.parity import name

FNUZ = pytest.mark.parametrize("fnuz", [False, True], ids=["e4m3fn", "e4m3fnuz"])


def numbers(form: torch.dtype) -> torch.Tensor:
    """Every finite number of the form, in order."""
    values = torch.arange(256, dtype=torch.uint8).view(form).double()
    return values[values.isfinite()].unique()


@FNUZ
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_codes_are_the_nearest(fnuz: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(9, 130, generator=torch.Generator().manual_seed(2)).to(dtype)
    q, scale = fp8.quantize(weight, fnuz=fnuz)
    assert (q.dtype, q.shape, scale.shape) == (FP8[fnuz], weight.shape, (9, 1))
    every = numbers(q.dtype)
    due = (weight.double() / scale.double())[..., None].sub(every).abs().amin(-1)
    error = (weight.double() / scale.double() - q.double()).abs()
    assert bool((error <= due + 1e-5 * q.double().abs()).all())
    assert torch.equal(scale[:, 0], weight.float().abs().amax(1) / every.max())


@FNUZ
def test_dequantised(fnuz: bool) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    held = fp8.quantize(weight, fnuz=fnuz)
    exact = held.w.double() * held.scale.double()
    assert torch.equal(dequantize(held), exact.float())
    assert torch.equal(dequantize(held, torch.float64), exact)
    assert float((dequantize(held) - weight).norm() / weight.norm()) < 0.04


@FNUZ
@pytest.mark.parametrize("size", [0.0, 1e-44, 3e38], ids=["zeros", "subnormal", "largest"])
def test_rows_at_the_ends_of_the_range(fnuz: bool, size: float) -> None:
    weight = torch.tensor([[size, -size, size / 2, 0.0]])
    held = fp8.quantize(weight, fnuz=fnuz)
    assert bool(held.w.float().isfinite().all())
    back = dequantize(held)
    assert bool(back.isfinite().all())
    assert torch.allclose(back, weight, rtol=1e-2, atol=1e-40)


def test_what_is_refused() -> None:
    with pytest.raises(KernelError, match="not finite"):
        fp8.quantize(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(KernelError, match="fp8 takes a float weight"):
        fp8.quantize(torch.ones(3, dtype=torch.int32))


@FNUZ
def test_every_code_round_trips(fnuz: bool) -> None:
    """Each of the 256 is the code of its number, in every dtype that holds it; NaN is NaN."""
    form = FP8[fnuz]
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        values = codes.view(form).to(dtype)
        assert values.isnan().nonzero().flatten().tolist() == ([0x80] if fnuz else [0x7F, 0xFF])
        again, finite = values.to(form), values.isfinite()
        assert torch.equal(again.view(torch.uint8)[finite], codes[finite])
        assert torch.equal(again.isnan(), ~finite)  # of NaN two codes may become one
    every = values[finite]
    assert (every.abs().max(), every[every > 0].min()) == ((240, 2**-10) if fnuz else (448, 2**-9))
    assert len(every.unique()) == (255 if fnuz else 253)


@FNUZ
def test_bits_of_one_form_are_other_numbers_in_the_other(fnuz: bool) -> None:
    here, there = FP8[fnuz], FP8[not fnuz]
    values = torch.tensor([0.25, 1.0, -3.5, 112.0]).to(here)
    assert torch.equal(values.view(there).float(), values.float() * (2 if fnuz else 0.5))
    minus_zero = torch.tensor([-0.0]).to(FP8[0])
    assert minus_zero.view(FP8[1]).float().isnan().all()
    assert torch.tensor([-0.0]).to(FP8[1]).view(torch.uint8).item() == 0, "it has one zero"
