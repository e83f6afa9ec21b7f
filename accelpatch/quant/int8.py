"""int8 weights: w = q * scale, symmetric, q in -127..127, one scale per row or per group along K.

scale = absmax / 127 in float32 (Dettmers et al. 2022, arXiv:2208.07339, "absmax"). -128 is not used, so that q and -q
both exist. A group of zeros has scale 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.quant.weight import OrderedWeight, QuantizedWeight, grouped, row_blocks


def quantize(weight: Tensor, *, group_size: int | None = None) -> QuantizedWeight:
    """Quantise a float weight [N, K] to q[N, K] int8 and scale[N, G] float32; group_size None: one scale per row.

    Raises KernelError for NaN or infinity, and where group_size does not divide K.
    """
    blocks = row_blocks(grouped(weight, group_size, "int8"))
    q, scale = zip(*map(_rows, blocks), strict=True)
    return QuantizedWeight(torch.cat(q), torch.cat(scale), None)


def _rows(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups [n, G, K / G] to q[n, K] and scale[n, G]."""
    scale = groups.abs().amax(dim=2) / 127
    # where absmax / 127 is too small for a float32 the scale is 0, and so is every weight
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(2)
    q = (groups / divisor).round_().clamp_(-127, 127).to(torch.int8)
    return q.flatten(1), scale


def dequantize(weight: QuantizedWeight | OrderedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """w[N, K] in `dtype`, computed in float32 or wider and rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    groups = weight.q.to(wide).unflatten(1, (weight.scale.shape[1], -1))
    return groups.mul_(weight.scale.to(wide).unsqueeze(2)).flatten(1).to(dtype)
