"""8-bit float weights: w = q * scale, rounded to nearest; one float32 scale per row: absmax / largest number of the
format.

float8_e4m3fn (largest 448) everywhere but on gfx942, whose matrix units take float8_e4m3fnuz (largest 240). A row of
zeros has scale 0. Format: OCP 8-bit floating point, E4M3.

In blocks of 128 x 128, whose last ones may be smaller, each has one scale; a row has the scales of its blocks, so that
rows can be joined and parted. Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import FP8_BLOCK, Fp8Rows
from accelpatch.quant.weight import grouped

NAN = 0x7F  # of e4m3fn, without its sign
LARGEST = 448.0


def quantize(weight: Tensor, *, fnuz: bool = False) -> Fp8Rows:
    """Quantise a float weight [N, K] to q[N, K] float8, scale[N, 1] float32. Raises KernelError for NaN or infinity."""
    form = dtype_of(fnuz=fnuz)
    largest = torch.finfo(form).max
    rows = grouped(weight, None, "fp8").squeeze(1)
    scale = rows.abs().amax(dim=1, keepdim=True) / largest
    # torch's conversion does not saturate: a quotient that rounding took over the largest would be NaN
    q = (rows / torch.where(scale > 0, scale, 1.0)).clamp_(-largest, largest).to(form)
    return Fp8Rows(q, scale)


def quantize_blocks(weight: Tensor) -> Fp8Rows:
    """Quantise a float weight [N, K] to q[N, K] float8_e4m3fn in blocks, scale[N, ceil(K / 128)] float32. Raises
    KernelError for NaN or infinity."""
    rows = grouped(weight, None, "fp8").squeeze(1)
    n, k = rows.shape
    padded = functional.pad(rows, (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
    most = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).abs().amax((1, 3))
    scale = of_blocks(most / LARGEST, n)
    wide = scale.repeat_interleave(FP8_BLOCK, 1)[:, :k]
    return Fp8Rows((rows / torch.where(wide > 0, wide, 1.0)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale)


def rounded(x: Tensor) -> Tensor:
    """x[..., K] rounded to e4m3fn with a scale for each 128 values, its largest magnitude over 448, in x's dtype."""
    k = x.shape[-1]
    groups = functional.pad(x.to(torch.float32), (0, -k % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    codes = (groups / torch.where(scale > 0, scale, 1.0)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale).flatten(-2)[..., :k].to(x.dtype)


def of_blocks(scale: Tensor, n: int) -> Tensor:
    """scale[n, G] of rows, from the scales of their blocks of 128 x 128 values."""
    return scale.repeat_interleave(FP8_BLOCK, 0)[:n].contiguous()


def check_blocks(weight: Fp8Rows, n: int | None, k: int | None) -> None:
    """Raise KernelError unless a weight from a file is one [n, k] with scales of blocks, all of which are valid."""
    q, scale = weight.w, weight.scale
    if q.dtype != torch.float8_e4m3fn or n is None or k is None or list(q.shape) != [n, k]:
        raise KernelError(f"q is {q.dtype} {list(q.shape)}, and float8_e4m3fn {[n, k]} belongs here")
    if bool((q.view(torch.uint8) & NAN == NAN).any()):
        raise KernelError("q has NaN: write the checkpoint again")
    due = [n, -(-k // FP8_BLOCK)]
    if scale.dtype != torch.float32 or list(scale.shape) != due:
        raise KernelError(f"scale is {scale.dtype} {list(scale.shape)}, and float32 {due} belongs here")
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise KernelError("scale has NaN, infinity or a negative number: write the checkpoint again")


def dtype_of(*, fnuz: bool) -> torch.dtype:
    """The dtype of the codes."""
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def quantize_as(weight: Tensor, like: Fp8Rows) -> Fp8Rows:
    """Quantise a float weight [N, K] to the 8-bit format of `like`: e4m3fn or e4m3fnuz, scales of rows or of blocks."""
    if like.blocks:
        return quantize_blocks(weight)
    return quantize(weight, fnuz=like.w.dtype == torch.float8_e4m3fnuz)
