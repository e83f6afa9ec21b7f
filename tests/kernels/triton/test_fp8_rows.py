"""Rows of 8-bit floats by Triton: the very bits of torch's, of ties and at both ends of the range, with a norm too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.activation.activated_rows import activated_rows
from accelpatch.kernels.ops.norm.layernorm import layernorm_rows
from accelpatch.kernels.ops.norm.rmsnorm_rows import rmsnorm_rows
from tests.support.fp8 import FORMS, between, codes, numbers
from tests.support.interpreted import DEVICE, HERE, LOW, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import name, strided

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _of_this_gpu(request: pytest.FixtureRequest) -> None:
    if "form" in request.fixturenames:
        form = request.getfixturevalue("form")
        if reason := rows.form_why_not(rows.of_shape(64, LOW, form=form), probe(DEVICE)):
            pytest.skip(reason)


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def alike(x: Tensor, form: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The codes by Triton, which are those of the CPU's torch, with its scales."""
    due, held = rows.by_torch(x.cpu(), None if scale is None else scale.cpu(), form)
    ran = dispatch.calls["quantize_rows", "triton"]
    with dispatch.forced("triton"):
        q, found = rows.quantize_rows(x.to(DEVICE), scale, form)
    assert dispatch.calls["quantize_rows", "triton"] == ran + 1
    assert torch.equal(codes(q.cpu()), codes(due))
    assert torch.equal(found.cpu().nan_to_num(7), held.nan_to_num(7))
    return q


@here
@FORMS
def test_numbers_and_what_lies_between_them(form: torch.dtype) -> None:
    values, due = between(form)
    assert torch.equal(alike(values[None], form)[0].float().cpu(), due)
    assert torch.equal(alike(numbers(form)[None], form)[0].float().cpu(), numbers(form))


@here
@FORMS
def test_small_values_keep_their_sign_where_there_is_a_negative_zero(form: torch.dtype) -> None:
    tiny = torch.tensor([[float(rows.LARGEST[form]), -(2.0**-12), 2.0**-12, -0.0, 0.0, -(2.0**-10), 2.0**-140]])
    alike(tiny, form)


@here
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=name)
def test_random_rows_of_every_size(form: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    for m, k in ((1, 1), (2, 7), (7, 130), (33, 1537), (3, 11008)):
        x = torch.randn(m, k, generator=generator) * 10.0 ** torch.randint(-4, 4, (m, 1), generator=generator)
        alike(x.to(dtype), form)
        alike(x.to(dtype), form, torch.tensor([0.03], device=DEVICE))
        alike(strided(x.to(dtype)), form)


@here
@FORMS
def test_rows_that_are_not_finite_or_too_small(form: torch.dtype) -> None:
    x = torch.randn(6, 33, generator=torch.Generator().manual_seed(2))
    x[1], x[2], x[3, 4], x[4, 0], x[5] = 0, x[2] * 2.0**-125, math.nan, -math.inf, x[5] * 2.0**-117
    alike(x, form)


@here
@FORMS
def test_no_rows(form: torch.dtype) -> None:
    assert alike(torch.zeros(0, 66), form).shape == (0, 66)


@here
@FORMS
@pytest.mark.parametrize("added", [False, True], ids=["plain", "added"])
def test_rows_of_a_norm_are_those_of_the_two_operations(form: torch.dtype, added: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(7, 130, generator=generator).to(DEVICE, LOW) for _ in range(2))
    weight = torch.randn(130, generator=generator).to(DEVICE, LOW)
    args = (x, residual if added else None, weight, 1e-5, False, None, form)
    with dispatch.forced("triton"):
        q, scale, total = rmsnorm_rows(*args)
        apart = dispatch.kernel("rmsnorm_rows").implementations["operations"].run(*args)
    assert torch.equal(codes(q), codes(apart[0]))
    assert torch.equal(scale, apart[1])
    assert torch.equal(total, apart[2])


@here
@FORMS
@pytest.mark.parametrize("normed", [False, True], ids=["sum", "normed"])
@pytest.mark.parametrize("added", [False, True], ids=["plain", "added"])
def test_rows_of_a_layernorm_are_those_of_the_single_operations(form: torch.dtype, added: bool, normed: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(7, 130, generator=generator).to(DEVICE, LOW) for _ in range(2))
    weight, bias = torch.randn(2, 130, generator=generator).to(DEVICE, LOW)
    args = (x, residual if added else None, weight, bias, 1e-5, None, form, normed)
    with dispatch.forced("triton"):
        q, scale, kept = layernorm_rows(*args)
    due = torch.nn.functional.layer_norm(x + residual if added else x, (130,), weight, bias, 1e-5)
    apart = dispatch.kernel("layernorm_rows").implementations["operations"].run(*args)
    if normed:
        assert (kept.float() - due.float()).abs().max() <= 2**-7 * due.abs().max()
    else:
        assert torch.equal(kept, apart[2])
    # a rounding of the norm to its neighbour moves a code by one step
    assert (codes(q).float() != codes(apart[0]).float()).float().mean() < 0.02
    torch.testing.assert_close(scale, apart[1], rtol=2**-7, atol=0)


@here
@FORMS
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_rows_of_an_activation_are_those_of_the_two_operations(form: torch.dtype, activation: str) -> None:
    x = torch.randn(7, 130, generator=torch.Generator().manual_seed(6)).to(DEVICE, LOW)
    with dispatch.forced("triton"):
        q, scale = activated_rows(x, activation, None, form)
    apart = dispatch.kernel("activated_rows").implementations["operations"].run(x, activation, None, form)
    assert (codes(q).float() != codes(apart[0]).float()).float().mean() < 0.02
    torch.testing.assert_close(scale, apart[1], rtol=2**-7, atol=0)
