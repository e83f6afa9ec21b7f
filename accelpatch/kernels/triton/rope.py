"""Cosines and sines, one position per program; see ../ops/attention/rope.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.launch import on


@triton.jit
def _position(positions, inv_freq, cos, sin, scaling, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    frequency = tl.load(inv_freq + columns, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    left = row * 2 * half + columns
    c = (tl.cos(angle) * scaling).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    tl.store(cos + left, c, mask=inside)
    tl.store(cos + left + half, c, mask=inside)
    tl.store(sin + left, s, mask=inside)
    tl.store(sin + left + half, s, mask=inside)


def rotary_cos_sin(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As the operation: (cos, sin)[B, L, D]."""
    half = inv_freq.shape[0]
    cos, sin = (inv_freq.new_empty((*position_ids.shape, 2 * half), dtype=dtype) for _ in range(2))
    if cos.numel():
        with on(cos):
            _position[(position_ids.numel(),)](
                position_ids.contiguous(), inv_freq.contiguous(), cos, sin, float(attention_scaling), half,
                triton.next_power_of_2(half), num_warps=1,
            )  # fmt: skip
    return cos, sin
