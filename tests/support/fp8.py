"""Numbers and codes of the two forms of e4m3, by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.layouts.row_major import FP8, fp8_name

FORMS = pytest.mark.parametrize("form", FP8, ids=fp8_name)


def codes(q: Tensor) -> Tensor:
    """The bits of 8-bit floats, uint8."""
    return q.contiguous().view(torch.uint8)


def numbers(form: torch.dtype) -> Tensor:
    """Every finite number of a form in ascending order, float32; zero once."""
    values = torch.arange(256, dtype=torch.uint8).view(form).float()
    return values[values.isfinite()].unique()


def between(form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values between each two neighbours (a tie, and just beside it, either side), with the form's largest number, and
    what they round to: of a tie the neighbour whose code is even."""
    every = numbers(form)
    low, high = every[:-1].double(), every[1:].double()
    tie = (low + high) / 2
    even = torch.where(codes(every[:-1].to(form)) % 2 == 0, low, high)
    beside = [torch.nextafter(tie.float(), one.float()).double() for one in (low, high)]
    values = torch.cat([tie, *beside, every[-1:].double()]).float()
    return values, torch.cat([even, low, high, every[-1:].double()]).float()
