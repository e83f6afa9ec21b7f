"""8-bit float weights: w = q * scale, rounded to nearest; one float32 scale per row: absmax / largest number of the
format.

float8_e4m3fn (largest 448) everywhere but on gfx942, whose matrix units take float8_e4m3fnuz (largest 240). A row of
zeros has scale 0. Format: OCP 8-bit floating point, E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels.layouts.row_major import Fp8Rows
from accelpatch.quant.weight import grouped


def quantize(weight: Tensor, *, fnuz: bool = False) -> Fp8Rows:
    """Quantise a float weight [N, K] to q[N, K] float8, scale[N, 1] float32. Raises KernelError for NaN or infinity."""
    form = dtype_of(fnuz=fnuz)
    largest = torch.finfo(form).max
    rows = grouped(weight, None, "fp8").squeeze(1)
    scale = rows.abs().amax(dim=1, keepdim=True) / largest
    # torch's conversion does not saturate: a quotient that rounding took over the largest would be NaN
    q = (rows / torch.where(scale > 0, scale, 1.0)).clamp_(-largest, largest).to(form)
    return Fp8Rows(q, scale)


def dtype_of(*, fnuz: bool) -> torch.dtype:
    """The dtype of the codes."""
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def quantize_as(weight: Tensor, held: Fp8Rows) -> Fp8Rows:
    """Quantise a float weight [N, K] to the form of another."""
    return quantize(weight, fnuz=held.w.dtype == torch.float8_e4m3fnuz)
