"""Values of GGUF's blocks in plain torch, for whole rows at once; layouts/gguf_blocks.py has the formats."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels.layouts.gguf_blocks import FORMS


def split_blocks(rows: Tensor, form: str) -> Tensor:
    """[N, blocks, bytes] of uint8[N, row bytes]."""
    return rows.contiguous().unflatten(1, (-1, FORMS[form].bytes))


def half_at(blocks: Tensor, byte: int) -> Tensor:
    """The float16 at a byte of each block, [N, blocks, 1]."""
    return blocks[:, :, byte : byte + 2].contiguous().view(torch.float16)


def nibbles(data: Tensor) -> Tensor:
    """Low nibbles, then high ones, of the bytes of the last dimension."""
    return torch.cat((data & 15, data >> 4), -1)


def dequantize_rows(rows: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """w[N, K] in `dtype`, float32 or wider, of uint8[N, row bytes]; rounded once, where the formula has a sum."""
    blocks = split_blocks(rows, form)
    if form == "Q6_K":
        return _q6_k(blocks, dtype).flatten(1)
    d = half_at(blocks, 0).to(dtype)
    if form == "Q8_0":
        return (blocks[:, :, 2:].view(torch.int8).to(dtype) * d).flatten(1)
    if form == "Q4_0":
        return ((nibbles(blocks[:, :, 2:]).to(dtype) - 8) * d).flatten(1)
    m = half_at(blocks, 2).to(dtype)
    if form == "Q4_1":
        return (nibbles(blocks[:, :, 4:]).to(dtype) * d).add_(m).flatten(1)
    scales, minimums = six_bits(blocks[:, :, 4:16])
    codes = nibbles(blocks[:, :, 16:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    values = codes.to(dtype) * (d * scales.to(dtype))[:, :, :, None]
    return values.sub_((m * minimums.to(dtype))[:, :, :, None]).flatten(1)


def six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and the eight minimums of Q4_K, 6 bits each, of 12 bytes [N, blocks, 12]."""
    low, high, both = data.split(4, -1)
    scales = torch.cat((low & 63, both & 15 | (low >> 6) << 4), -1)
    return scales, torch.cat((high & 63, both >> 4 | (high >> 6) << 4), -1)


def _q6_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    low = blocks[:, :, :128].unflatten(2, (2, 2, 32))  # halves of 128 values, and of their bytes
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32))
    pairs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    codes = torch.cat((low & 15, low >> 4), 3) | pairs << 4
    scales = blocks[:, :, 192:208].view(torch.int8).to(dtype) * half_at(blocks, 208).to(dtype)
    values = codes.flatten(2).unflatten(2, (16, 16)).to(dtype).sub_(32)
    return values.mul_(scales[:, :, :, None])
