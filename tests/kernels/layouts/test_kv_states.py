"""Keys and values in 8 bits: their rounding, by another computation of it; what is read, copied and counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.layouts.kv_states import (
    CODES,
    FLOAT,
    LARGEST,
    QuantizedStates,
    copy_first_,
    floats,
    format_of,
    part_of,
    tensors_of,
    zeros,
)
from accelpatch.recipe.schema import KV_CACHES
from tests.support.rounded_cache import rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def states(dtype: torch.dtype = torch.float32, *, size: int = 64, spread: float = 1.0) -> Tensor:
    """[2, 3, 50, size]: rows of many magnitudes, with zeros, and halves of a code among them."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(2, 3, 50, size, generator=generator) * 2.0 ** torch.linspace(-12, 12, 50)[:, None] * spread
    made[0, 0, 7] = 0.0
    made[1, 2, 9] = torch.arange(size) / 2  # codes that end in a half, where the scale is a power of two
    made[1, 2, 9, 0] = 127.0
    return made.to(dtype)


def held(given: Tensor, form: str) -> QuantizedStates:
    made = zeros(form, tuple(given.shape), given.dtype, given.device)
    assert isinstance(made, QuantizedStates)
    made[:, :, :] = given
    return made


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_what_the_formula_gives(form: str, dtype: torch.dtype) -> None:
    given = states(dtype)
    assert torch.equal(held(given, form)[:], rounded(given, form).to(dtype))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_error_of_a_row(form: str) -> None:
    given = states()
    error = (held(given, form)[:] - given).abs().amax(-1)
    most = given.abs().amax(-1)
    assert bool((error <= most * (0.51 / 127 if form == "int8" else 0.0365)).all())
    assert bool(error.mean() > 0)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_written_again_they_stay(form: str) -> None:
    once = held(states(), form)
    again = held(once[:], form)
    assert all(torch.equal(one, other) for one, other in zip(once.tensors, again.tensors, strict=True))


@pytest.mark.parametrize("form", CODES)
def test_indices(form: str) -> None:
    given, whole = states(), held(states(), form)
    step = held(torch.zeros_like(given), form)
    rows, slots = torch.arange(2), torch.tensor([4, 31])
    step[rows, :, slots] = given[rows, :, slots]
    assert torch.equal(step[rows, :, slots], whole[rows, :, slots])
    assert torch.equal(step[0, :, 4], whole[0, :, 4])
    assert not step[:, :, 5:31].any()
    many = slots[:, None] + torch.arange(3)
    step[rows[:, None], :, many] = given[rows[:, None], :, many]
    assert torch.equal(step[0, :, 4:7], whole[0, :, 4:7])
    assert torch.equal(part_of(whole, slice(1, 2))[:], whole[1:2])


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_no_number_is_nan(form: str, odd: float) -> None:
    given = states()
    given[1, 1, 3, 5] = odd
    made = held(given, form)[:]
    assert made[1, 1, 3].isnan().all()
    assert made.isnan().sum() == 64


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers(form: str, dtype: torch.dtype) -> None:
    """Nothing overflows 8 bits, whatever the numbers are."""
    for most in (torch.finfo(dtype).max / 2, torch.finfo(dtype).tiny * 1024):
        given = torch.full((1, 1, 1, 16), most, dtype=dtype)
        given[..., 0] = -most
        made = held(given, form)[:]
        assert made.isfinite().all()
        torch.testing.assert_close(made, given, rtol=0.02, atol=0)


def test_bf16_beside_a_model_in_float32() -> None:
    given = states()
    made = held(given, "bf16")
    assert torch.equal(made[:], given.to(torch.bfloat16).float())
    assert isinstance(zeros("bf16", (1, 1, 1, 8), torch.bfloat16, torch.device("cpu")), Tensor)  # nothing to round


def test_codes_of_a_model_s_own_stay() -> None:
    """A cache of int8 codes with static scales, as SmoothQuant's OPT fills it, is what it is in every format."""
    made = zeros("fp8", (1, 1, 4, 8), torch.int8, torch.device("cpu"))
    assert isinstance(made, Tensor)
    assert made.dtype == torch.int8


@pytest.mark.parametrize("form", [FLOAT, *CODES])
def test_a_larger_one(form: str) -> None:
    small = zeros(form, (2, 3, 50, 64), torch.float32, torch.device("cpu"))
    small[:, :, :] = states()
    large = zeros(form, (2, 3, 90, 64), torch.float32, torch.device("cpu"))
    copy_first_(small, large)
    assert format_of(large) == form
    assert torch.equal(floats(large)[:, :, :50], floats(small))
    assert all(torch.equal(a[:, :, :50], b) for a, b in zip(tensors_of(large), tensors_of(small), strict=True))


@pytest.mark.parametrize("size, most", [(128, 0.51), (64, 0.52)], ids=str)
@pytest.mark.parametrize("form", LARGEST)
def test_bytes_beside_those_of_bf16(form: str, size: int, most: float) -> None:
    made = held(states(torch.bfloat16, size=size), form)
    assert made.nbytes <= most * made.shape.numel() * 2
    number, scale = KV_CACHES[form]  # what plans count
    assert made.nbytes == made.shape.numel() * number + made.shape[:3].numel() * scale
