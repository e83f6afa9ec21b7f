"""8-bit float weights: w = q * scale, rounded to nearest; one float32 scale per row: absmax / largest number of the
format.

float8_e4m3fn (largest 448) everywhere but on gfx942, whose matrix units take float8_e4m3fnuz (largest 240). A row of
zeros has scale 0. Format: OCP 8-bit floating point, E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.quant.weight import QuantizedWeight, grouped


def quantize(weight: Tensor, *, fnuz: bool = False) -> QuantizedWeight:
    """Quantise a float weight [N, K] to q[N, K] float8, scale[N, 1] float32. Raises KernelError for NaN or infinity."""
    form = dtype_of(fnuz=fnuz)
    largest = torch.finfo(form).max
    rows = grouped(weight, None, "fp8").squeeze(1)
    scale = rows.abs().amax(dim=1, keepdim=True) / largest
    # torch's conversion does not saturate: a quotient that rounding took over the largest would be NaN
    q = (rows / torch.where(scale > 0, scale, 1.0)).clamp_(-largest, largest).to(form)
    return QuantizedWeight(q, scale, None)


def dtype_of(*, fnuz: bool) -> torch.dtype:
    """The dtype of the codes."""
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """w[N, K] in `dtype`, computed in float32 or wider and rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    return weight.q.to(wide).mul_(weight.scale.to(wide)).to(dtype)
