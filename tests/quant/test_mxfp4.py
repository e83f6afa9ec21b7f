"""MXFP4 of floats, against the definition in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.quant import codebook

MAGNITUDES = [Fraction(one) for one in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def of_group(group: list[float]) -> tuple[int, list[int]]:
    """(exponent, codes) of up to 32 values by section 6.3 of the specification."""
    most = max(abs(Fraction(value)) for value in group)
    exponent = 0
    if most:
        exponent = -140
        while Fraction(2) ** (exponent + 1) <= most:
            exponent += 1
        exponent = max(exponent - 2, -127)
    codes = []
    for value in group:
        scaled = abs(Fraction(value)) / Fraction(2) ** exponent
        code = min(range(8), key=lambda u: (abs(MAGNITUDES[u] - scaled), u % 2))
        codes.append(code + (8 if value < 0 or str(value) == "-0.0" else 0))
    return exponent, codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4, 1e-30])
def test_nearest_values_and_power_of_two(dtype: torch.dtype, size: float) -> None:
    if dtype == torch.float16 and size == 1e-30:
        size = 1e-6
    weight = (torch.randn(6, 96, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.99])
    weight[0, :10], weight[1, 32:42], weight[2, :32] = ties, -ties, 0
    weight[0, 10:32], weight[1, 42:64] = 0, 0
    held = codebook.quantize(weight, group_size=32, codebook="e2m1")
    packed, scale = held.w.view(torch.uint8), held.scale.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    for row in range(6):
        for group in range(3):
            part = slice(32 * group, 32 * group + 32)
            exponent, due = of_group(weight[row, part].tolist())
            assert scale[row, group].item() == exponent + 127
            assert codes[row, part].tolist() == due


@pytest.mark.parametrize("group", [16, 64])
def test_groups_are_of_32(group: int) -> None:
    with pytest.raises(KernelError, match=f"MXFP4 has groups of 32, not {group}"):
        codebook.quantize(torch.ones(2, 64), group_size=group, codebook="e2m1")


def test_a_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(KernelError, match="inf"):
        codebook.quantize(torch.full((1, 32), 1e39, dtype=torch.float64), group_size=32, codebook="e2m1")
