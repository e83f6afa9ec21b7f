"""Codebooks of 4-bit floats: the value of each code, before its group's scale, as float32 holds it.

nf4   quantiles of a normal distribution, from -1 to 1 (Dettmers et al. 2023, arXiv:2305.14314)
fp4   a sign, two bits of exponent and one of mantissa, over 12 (bitsandbytes)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)

CODEBOOKS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "nf4": (
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ),
        "fp4": (*_FP4, 0.0, *(-value for value in _FP4[1:])),
    }
)  # fmt: skip
