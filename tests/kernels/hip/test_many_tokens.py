"""Whose product of many tokens with int4 weights runs: the device library's own, or another's."""

from __future__ import annotations

import pytest
import torch

from accelpatch.device import KNOWN
from accelpatch.kernels import int4_tiles
from accelpatch.kernels.tiled_int4_linear import takes_many


@pytest.mark.parametrize(
    "arch, k, group, cut, takes",
    [
        ("sm_90", 256, 128, 0, True),
        ("sm_90", 256, 256, 8, True),
        ("sm_90", 136, 136, 0, True),
        ("sm_90", 132, 132, 0, False),
        ("sm_90", 256, 128, 4, False),
        ("sm_90", 256, 64, 0, False),
        ("sm_80", 256, 128, 0, False),
        ("gfx942", 256, 128, 0, False),
    ],
)
def test_takes_many(arch: str, k: int, group: int, cut: int, takes: bool) -> None:
    """cut: values of x before each row that is given."""
    q, scale = torch.zeros(16, k // 2, dtype=torch.int8), torch.ones(16, k // group, dtype=torch.float16)
    x = torch.zeros(9, cut + k, dtype=torch.bfloat16)[:, cut:]
    assert takes_many(x, int4_tiles.tile(q, scale, None), KNOWN[arch]) is takes
