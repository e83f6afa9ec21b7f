"""4-bit weights in groups along K, u in 0..15, two a byte: the even k in the low nibble (stored as torch.int8).

    asymmetric   w = u * scale + offset     offset a float: the group's minimum (GGUF Q4_1)
    symmetric    w = (u - 8) * scale        scale = -(the value of largest magnitude) / 8, so it can be negative (Q4_0)
    zero point   w = (u - z) * scale        z an integer of 0..15, as int8; 0 is exact (GPTQ and AWQ; theirs may be 16)

scale and offset are float16, and float32 for a weight where a float16 would overflow or fall below its normal range.
They are rounded first and u is chosen for the rounded ones. A group whose values are all equal is kept exactly as far
as u * scale + offset can name the value: all float16 and bfloat16 values of normal size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.ops.linear import int4_linear
from accelpatch.quant.weight import fits_half, grouped

ZERO_CODE = -120  # a byte of two symmetric zeros, u = 8


def quantize(weight: Tensor, *, group_size: int, symmetric: bool = False, zero_point: bool = False) -> Int4Rows:
    """Quantise a float weight [N, K] to packed q[N, K / 2], scale[N, G] and offset[N, G] (None where symmetric).

    zero_point: the offset is an integer, not a minimum. Raises KernelError for NaN or infinity, an odd K, and where
    group_size does not divide K.
    """
    groups = grouped(weight, group_size, "int4")
    if weight.shape[1] % 2:
        raise KernelError(f"int4 packs two weights a byte and K = {weight.shape[1]} is odd: use int8 for this weight")
    return _symmetric(groups) if symmetric else _zero_point(groups) if zero_point else _asymmetric(groups)


def _symmetric(groups: Tensor) -> Int4Rows:
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scale = _store(extreme / -8)
    return Int4Rows(pack((_divide(groups, scale) + 8).clamp_(0, 15)), scale)


def _zero_point(groups: Tensor) -> Int4Rows:
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    _check_range(low, high)
    scale = _store((high - low) / 15)
    zero = _divide(-low.unsqueeze(2), scale).squeeze(2).clamp_(0, 15)
    u = (_divide(groups, scale) + zero.unsqueeze(2)).clamp_(0, 15)
    return Int4Rows(pack(u), scale, zero.to(torch.int8))


def _asymmetric(groups: Tensor) -> Int4Rows:
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    constant = low == high
    dtype = _storage(torch.stack((low, high, (high - low) / 15)))
    if dtype != torch.float16:
        _check_range(low, high)
    offset = low.to(dtype)
    # a constant group has u = 1 and, as its scale, the offset's rounding error
    scale = torch.where(constant, high - offset.float(), (high - offset.float()) / 15).to(dtype)
    u = _divide(groups - offset.float().unsqueeze(2), scale).clamp_(0, 15)
    return Int4Rows(pack(u), scale, offset)


def _check_range(low: Tensor, high: Tensor) -> None:
    if not bool(torch.isfinite(high - low).all()):
        raise KernelError("int4: a group's values lie further apart than a float32 can say: use int8 for this weight")


def _divide(groups: Tensor, scale: Tensor) -> Tensor:
    divisor = scale.float().unsqueeze(2)
    return (groups / torch.where(divisor == 0, 1.0, divisor)).round_()


def _storage(values: Tensor) -> torch.dtype:
    return torch.float16 if fits_half(values) else torch.float32


def _store(scale: Tensor) -> Tensor:
    return scale.to(_storage(scale))


def pack(u: Tensor) -> Tensor:
    """Pack u[N, K] or [N, G, K / G], integers 0..15 of any dtype, to q[N, K / 2] int8."""
    u = u.flatten(1).to(torch.uint8)
    return (u[:, 0::2] | (u[:, 1::2] << 4)).contiguous().view(torch.int8)


def unpack(q: Tensor) -> Tensor:
    """Unpack q[N, K / 2] to u[N, K] int8 in 0..15; the inverse of `pack`."""
    return int4_linear.unpack(q)
