"""A cache of transformers that rounds what it takes to 8 bits and gives floats: what a model with such a cache gives.

The rounding is written out here once more, number by number in float64, for tests to compare with.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

MOST = {"int8": 127.0, "fp8": 448.0}
E4M3 = torch.tensor(
    [(8 + m) / 8 * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127],
    dtype=torch.float64,
)  # its 127 magnitudes that are numbers


def rounded(states: Tensor, form: str) -> Tensor:
    """states[..., D] as a cache in `form` holds them, in float64."""
    if form == "bf16":
        return states.to(torch.bfloat16).double()
    scale = (states.float().abs().amax(-1, keepdim=True) / MOST[form]).to(torch.bfloat16).double()
    x = states.double() / torch.where(scale > 0, scale, 1.0)
    if form == "int8":
        return x.round().clamp(-127, 127) * scale
    magnitudes = x.abs().clamp(max=448.0)
    above = torch.searchsorted(E4M3, magnitudes.contiguous()).clamp(max=len(E4M3) - 1)
    below = (above - 1).clamp(min=0)
    up, down = E4M3[above] - magnitudes, magnitudes - E4M3[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return E4M3[nearest] * x.sign() * scale


class RoundingCache(DynamicCache):
    """A cache whose layers keep, and give, what `rounded` does. skipped: so many updates of each layer return floats as
    they came: a prompt that the modules run."""

    def __init__(self, config: Any, form: str, skipped: int = 0):
        super().__init__(config=config)
        self.form, self.skipped = form, skipped
        self.calls: Counter[int] = Counter()

    def update(self, keys: Tensor, values: Tensor, place: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As of DynamicCache."""
        kept = (rounded(one, self.form).to(one.dtype) for one in (keys, values))
        made = super().update(*kept, place, *args, **kwargs)
        self.calls[place] += 1
        return (keys, values) if self.calls[place] <= self.skipped else made
