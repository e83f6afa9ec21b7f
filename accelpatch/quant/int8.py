"""int8 weights: w = q * scale, symmetric, q in -127..127, one scale per row or per group along K.

scale = absmax / 127 in float32 (Dettmers et al. 2022, arXiv:2208.07339, "absmax"). -128 is not used, so that q and -q
both exist. A group of zeros has scale 0. Scales may be float16 instead; codes are then chosen for the rounded ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accelpatch.kernels.layouts.row_major import Int8Rows
from accelpatch.quant.weight import fits_half, grouped, row_blocks


@dataclass(frozen=True)
class Int8Grid:
    """The values that a group can take. half: whether scales are float16, where they fit."""

    half: bool = False
    limits: ClassVar[tuple[int, int]] = (-127, 127)

    def storage(self, groups: Tensor) -> torch.dtype:
        """The dtype of the scales of groups[N, G, g]."""
        return torch.float16 if self.half and fits_half(groups.abs().amax(dim=2) / 127) else torch.float32

    def fit(self, groups: Tensor, dtype: torch.dtype, shrink: float = 1.0) -> tuple[Tensor, None]:
        """scale[N, G] of groups[N, G, g]. shrink: of the range that the codes cover."""
        return (groups.abs().amax(dim=2) * shrink / 127).to(dtype), None

    def codes(self, groups: Tensor, scale: Tensor, offset: None = None) -> Tensor:
        """q[N, G, g], integers -127..127 in float32, of the nearest values."""
        scale = scale.float()
        # where absmax / 127 is too small for a float32 the scale is 0, and so is every weight
        divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(2)
        return (groups / divisor).round_().clamp_(-127, 127)

    def values(self, q: Tensor, scale: Tensor, offset: None = None) -> Tensor:
        """The values of codes q[N, G, g], float32."""
        return q * scale.float().unsqueeze(2)

    def affine(self, scale: Tensor, offset: None = None) -> tuple[Tensor, Tensor, Tensor]:
        """step, zero and base of scale[N, G], each float32 [N, G]: a value is (q - zero) step + base."""
        step = scale.float()
        return step, torch.zeros_like(step), torch.zeros_like(step)

    def weight(self, q: Tensor, scale: Tensor, offset: None = None) -> Int8Rows:
        """The weight of codes q[N, G, g]."""
        return Int8Rows(q.flatten(1).to(torch.int8), scale)


def quantize(weight: Tensor, *, group_size: int | None = None, half_scales: bool = False) -> Int8Rows:
    """Quantise a float weight [N, K] to q[N, K] int8 and scale[N, G] float32; group_size None: one scale per row.

    half_scales: float16, for a weight whose scales are all of normal size there. Raises KernelError for NaN or
    infinity, and where group_size does not divide K.
    """
    groups, grid = grouped(weight, group_size, "int8"), Int8Grid(half_scales)
    dtype = grid.storage(groups)
    parts = []
    for rows in row_blocks(groups):
        scale, _ = grid.fit(rows, dtype)
        parts.append(grid.weight(grid.codes(rows, scale), scale))
    return Int8Rows(torch.cat([one.w for one in parts]), torch.cat([one.scale for one in parts]))


def quantize_as(weight: Tensor, like: Int8Rows) -> Int8Rows:
    """Quantise a float weight [N, K] with the group size and the scales' dtype of `like`, of the same shape."""
    half = like.scale.dtype == torch.float16
    return quantize(weight, group_size=like.k // like.scale.shape[1], half_scales=half)
