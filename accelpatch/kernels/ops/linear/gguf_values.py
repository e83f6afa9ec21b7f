"""Values of GGUF's blocks in plain torch, for whole rows at once; layouts/gguf_blocks.py has the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from accelpatch.kernels.layouts.gguf_blocks import FORMS, IQ4


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
    if form in WHOLE:
        return WHOLE[form](blocks, dtype).flatten(1)
    d = half_at(blocks, 0).to(dtype)
    if form == "Q8_0":
        return (blocks[:, :, 2:].view(torch.int8).to(dtype) * d).flatten(1)
    if form == "IQ4_NL":
        return (_book(nibbles(blocks[:, :, 2:]), dtype) * d).flatten(1)
    if form == "Q5_0":
        return ((_five(blocks[:, :, 2:]).to(dtype) - 16) * d).flatten(1)
    if form == "Q4_0":
        return ((nibbles(blocks[:, :, 2:]).to(dtype) - 8) * d).flatten(1)
    m = half_at(blocks, 2).to(dtype)
    if form == "Q4_1":
        return (nibbles(blocks[:, :, 4:]).to(dtype) * d).add_(m).flatten(1)
    if form == "Q5_1":
        return (_five(blocks[:, :, 4:]).to(dtype) * d).add_(m).flatten(1)
    scales, minimums = six_bits(blocks[:, :, 4:16])
    codes = nibbles(blocks[:, :, -128:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    if form == "Q5_K":
        codes = codes | (_bits(blocks[:, :, 16:48], 1, 8) << 4)
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


def _bits(data: Tensor, width: int, count: int) -> Tensor:
    """`count` fields of `width` bits of each byte, the lowest first: [N, blocks, count, bytes]."""
    return torch.stack([data >> (width * at) & ((1 << width) - 1) for at in range(count)], 2)


def _five(data: Tensor) -> Tensor:
    """Codes of 5 bits, of four bytes of fifth bits and 16 of nibbles."""
    return nibbles(data[:, :, 4:]) | (_bits(data[:, :, :4], 1, 8).transpose(2, 3).flatten(2) << 4)


def _book(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(IQ4, dtype=dtype, device=codes.device)[codes.int()]


def _pairs(data: Tensor) -> Tensor:
    """Codes of two bits of 256 values, of 64 bytes, as sixteen groups of 16."""
    return _bits(data.unflatten(2, (2, 32)).flatten(1, 2), 2, 4).unflatten(1, (-1, 2)).flatten(2).unflatten(2, (16, 16))


def _q2_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    d, least = (half_at(blocks, byte).to(dtype) for byte in (80, 82))
    scales, minimums = (one.to(dtype) for one in (blocks[:, :, :16] & 15, blocks[:, :, :16] >> 4))
    values = _pairs(blocks[:, :, 16:80]).to(dtype) * (d * scales)[:, :, :, None]
    return values.sub_((least * minimums)[:, :, :, None])


def _q3_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    high = _bits(blocks[:, :, :32], 1, 8).flatten(2).unflatten(2, (16, 16))
    codes = _pairs(blocks[:, :, 32:96]).to(dtype) - 4 * (1 - high.to(dtype))
    low = nibbles(blocks[:, :, 96:104])
    scales = low | (_bits(blocks[:, :, 104:108], 2, 4).flatten(2) << 4)
    return codes * ((scales.to(dtype) - 32) * half_at(blocks, 108).to(dtype))[:, :, :, None]


def _iq4_xs(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    low = _bits(blocks[:, :, 4:8], 4, 2).transpose(2, 3).flatten(2)
    scales = low | (_bits(blocks[:, :, 2:4], 2, 4).transpose(2, 3).flatten(2) << 4)
    values = _book(nibbles(blocks[:, :, 8:].unflatten(2, (8, 16))), dtype)
    return values * ((scales.to(dtype) - 32) * half_at(blocks, 0).to(dtype))[:, :, :, None]


#: form -> its values[N, blocks, ...], of blocks[N, blocks, bytes] in a dtype
WHOLE: Mapping[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip
