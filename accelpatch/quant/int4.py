"""4-bit weights in groups along K, u in 0..15, two a byte: the even k in the low nibble (stored as torch.int8).

    asymmetric   w = u * scale + offset     offset a float: the group's minimum (GGUF Q4_1)
    symmetric    w = (u - 8) * scale        scale = -(the value of largest magnitude) / 8, so it can be negative (Q4_0)
    zero point   w = (u - z) * scale        z an integer of 0..15, as int8; 0 is exact (GPTQ and AWQ; theirs may be 16)

scale and offset are float16, and float32 for a weight where a float16 would overflow or fall below its normal range.
They are rounded first and u is chosen for the rounded ones. A group whose values are all equal is kept exactly as far
as u * scale + offset can name the value: all float16 and bfloat16 values of normal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.ops.linear import int4_linear
from accelpatch.quant.weight import fits_half, grouped

ZERO_CODE = -120  # a byte of two symmetric zeros, u = 8


@dataclass(frozen=True)
class Int4Grid:
    """The values that a group can take. kind: "none" (symmetric), "minimum" or "zero_point"."""

    kind: str = "minimum"
    most: ClassVar[int] = 15  # the largest code

    @property
    def middle(self) -> int:
        """The code of zero in a symmetric weight."""
        return (self.most + 1) // 2

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        return 0, self.most

    def storage(self, groups: Tensor) -> torch.dtype:
        """The dtype of the scales and minima of groups[N, G, g]."""
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        extremes = {
            "none": lambda: torch.maximum(high, -low) / self.middle,
            "zero_point": lambda: _width(low, high) / self.most,
        }
        values = extremes.get(self.kind, lambda: torch.stack((low, high, (high - low) / self.most)))()
        return torch.float16 if fits_half(values) else torch.float32

    def fit(self, groups: Tensor, dtype: torch.dtype, shrink: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """scale[N, G], and offset[N, G] or None, of groups[N, G, g]. shrink: of the range that the codes cover."""
        if self.kind == "none":
            extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
            return (extreme * shrink / -self.middle).to(dtype), None
        low, high = groups.amin(dim=2) * shrink, groups.amax(dim=2) * shrink
        if self.kind == "zero_point":
            scale = (_width(low, high) / self.most).to(dtype)
            return scale, _divide(-low.clamp(max=0).unsqueeze(2), scale).squeeze(2).clamp_(0, self.most).to(torch.int8)
        if dtype != torch.float16:
            _width(low, high)
        offset = low.to(dtype)
        # a constant group has u = 1 and, as its scale, the offset's rounding error
        return torch.where(low == high, high - offset.float(), (high - offset.float()) / self.most).to(dtype), offset

    def codes(self, groups: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """u[N, G, g], integers 0..most in float32, of the nearest values."""
        if offset is None:
            return (_divide(groups, scale) + self.middle).clamp_(0, self.most)
        if self.kind == "minimum":
            return _divide(groups - offset.float().unsqueeze(2), scale).clamp_(0, self.most)
        return (_divide(groups, scale) + offset.float().unsqueeze(2)).clamp_(0, self.most)

    def values(self, u: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The values of codes u[N, G, g], float32."""
        step = scale.float().unsqueeze(2)
        if self.kind == "minimum" and offset is not None:
            return u * step + offset.float().unsqueeze(2)
        return (u - (self.middle if offset is None else offset.float().unsqueeze(2))) * step

    def affine(self, scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """step, zero and base, float32 [N, G], of a scale and an offset[N, G]: a value is (u - zero) step + base."""
        step = scale.float()
        nothing = torch.zeros_like(step)
        if offset is None:
            return step, torch.full_like(step, self.middle), nothing
        return (step, nothing, offset.float()) if self.kind == "minimum" else (step, offset.float(), nothing)

    def weight(self, u: Tensor, scale: Tensor, offset: Tensor | None) -> Int4Rows:
        """The weight of codes u[N, G, g]."""
        return Int4Rows(pack(u), scale, offset)


def quantize(weight: Tensor, *, group_size: int, symmetric: bool = False, zero_point: bool = False) -> Int4Rows:
    """Quantise a float weight [N, K] to packed q[N, K / 2], scale[N, G] and offset[N, G] (None where symmetric).

    zero_point: the offset is an integer, not a minimum. Raises KernelError for NaN or infinity, an odd K, and where
    group_size does not divide K.
    """
    groups = grouped(weight, group_size, "int4")
    if weight.shape[1] % 2:
        raise KernelError(f"int4 packs two weights a byte and K = {weight.shape[1]} is odd: use int8 for this weight")
    grid = Int4Grid("none" if symmetric else "zero_point" if zero_point else "minimum")
    scale, offset = grid.fit(groups, grid.storage(groups))
    return grid.weight(grid.codes(groups, scale, offset), scale, offset)


def _width(low: Tensor, high: Tensor) -> Tensor:
    """How far the values of groups, and zero, lie apart. Raises KernelError where a float32 cannot say it."""
    width = high.clamp(min=0) - low.clamp(max=0)
    if not bool(torch.isfinite(width).all()):
        raise KernelError("int4: a group's values lie further apart than a float32 can say: use int8 for this weight")
    return width


def _divide(groups: Tensor, scale: Tensor) -> Tensor:
    divisor = scale.float().unsqueeze(2)
    return (groups / torch.where(divisor == 0, 1.0, divisor)).round_()


def pack(u: Tensor) -> Tensor:
    """Pack u[N, K] or [N, G, K / G], integers 0..15 of any dtype, to q[N, K / 2] int8."""
    u = u.flatten(1).to(torch.uint8)
    return (u[:, 0::2] | (u[:, 1::2] << 4)).contiguous().view(torch.int8)


def unpack(q: Tensor) -> Tensor:
    """Unpack q[N, K / 2] to u[N, K] int8 in 0..15; the inverse of `pack`."""
    return int4_linear.unpack(q)
