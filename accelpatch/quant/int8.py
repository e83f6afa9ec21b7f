"""int8 weights: w = q * scale, symmetric, q in -127..127, one scale per row or per group along K.

scale = absmax / 127 in float32 (Dettmers et al. 2022, arXiv:2208.07339, "absmax"). -128 is not used, so that q and -q
both exist. A group of zeros has scale 0. Scales may be float16 instead; codes are then chosen for the rounded ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels.layouts.row_major import Int8Rows
from accelpatch.quant.weight import fits_half, grouped, row_blocks


def quantize(weight: Tensor, *, group_size: int | None = None, half_scales: bool = False) -> Int8Rows:
    """Quantise a float weight [N, K] to q[N, K] int8 and scale[N, G] float32; group_size None: one scale per row.

    half_scales: float16, for a weight whose scales are all of normal size there. Raises KernelError for NaN or
    infinity, and where group_size does not divide K.
    """
    groups = grouped(weight, group_size, "int8")
    half = half_scales and fits_half(groups.abs().amax(dim=2) / 127)
    q, scale = zip(*(_rows(rows, half) for rows in row_blocks(groups)), strict=True)
    return Int8Rows(torch.cat(q), torch.cat(scale))


def _rows(groups: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Quantise groups [n, G, K / G] to q[n, K] and scale[n, G]."""
    scale = groups.abs().amax(dim=2) / 127
    stored = scale.half() if half else scale
    scale = stored.float()
    # where absmax / 127 is too small for a float32 the scale is 0, and so is every weight
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(2)
    q = (groups / divisor).round_().clamp_(-127, 127).to(torch.int8)
    return q.flatten(1), stored


def quantize_as(weight: Tensor, held: Int8Rows) -> Int8Rows:
    """Quantise a float weight [N, K] with the group size and the scales' dtype of another of its shape."""
    half = held.scale.dtype == torch.float16
    return quantize(weight, group_size=held.k // held.scale.shape[1], half_scales=half)
