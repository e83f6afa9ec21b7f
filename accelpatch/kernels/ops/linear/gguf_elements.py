"""Values of GGUF's blocks one by one, by the place of each in its block: the reference of the operations.

gguf_values.py, which implementations use, computes whole rows in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from accelpatch.kernels.layouts.gguf_blocks import FORMS, IQ4

#: (bytes of blocks int64[N, blocks, bytes], places of values[V], dtype) -> values[N, blocks, V]
Decode = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def dense(dtype: torch.dtype, blocks: Tensor, form: str) -> Tensor:
    """The weight[N, K], value by value in float32 or wider and rounded to `dtype`."""
    wide, kind = torch.promote_types(dtype, torch.float32), FORMS[form]
    each = blocks.to(torch.int64).unflatten(1, (-1, kind.bytes))
    i = torch.arange(kind.values, device=blocks.device)
    return DECODERS[form](each, i, wide).flatten(1).to(dtype)


def _float16(each: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    bits = each[:, :, place : place + 1] + 256 * each[:, :, place + 1 : place + 2]
    return bits.to(torch.uint16).view(torch.float16).to(dtype)


def _signed(byte: Tensor) -> Tensor:
    return byte - byte // 128 * 256


def _nibble(each: Tensor, start: int, i: Tensor) -> Tensor:
    """Of 16 bytes, the low nibbles of which are the first 16 of 32 values."""
    return each[:, :, start + i % 16] >> (i // 16 % 2 * 4) & 15


def _bit(each: Tensor, start: int, i: Tensor) -> Tensor:
    """The fifth bit of value i of 32, in four bytes."""
    return each[:, :, start + i // 8] >> (i % 8) & 1


def _book(code: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(IQ4, dtype=dtype, device=code.device)[code]


def _six_bits(each: Tensor, j: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and minimum of group j of eight, 6 bits each."""
    s = each[:, :, 4:16]
    first, behind = s[:, :, j % 4], s[:, :, 4 + j % 4]
    late = s[:, :, 8 + j % 4]
    scale = torch.where(j < 4, first & 63, (late & 15) + (first >> 6) * 16)
    return scale.to(dtype), torch.where(j < 4, behind & 63, (late >> 4) + (behind >> 6) * 16).to(dtype)


def _q5(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    minimum = each.shape[2] == FORMS["Q5_1"].bytes
    code = _nibble(each, 8 if minimum else 6, i) + 16 * _bit(each, 4 if minimum else 2, i)
    d = _float16(each, 0, dtype)
    return d * code.to(dtype) + _float16(each, 2, dtype) if minimum else d * (code - 16).to(dtype)


def _q2_k(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    code = each[:, :, 16 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
    both = each[:, :, i // 16]
    d, least = _float16(each, 80, dtype), _float16(each, 82, dtype)
    return d * (both & 15).to(dtype) * code.to(dtype) - least * (both >> 4).to(dtype)


def _q3_k(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    code = each[:, :, 32 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
    less = 4 * (1 - (each[:, :, i % 32] >> (i // 32) & 1))
    j = i // 16
    low = each[:, :, 96 + j % 8] >> (j // 8 * 4) & 15
    scale = low + 16 * (each[:, :, 104 + j % 4] >> (j // 4 * 2) & 3) - 32
    return _float16(each, 108, dtype) * scale.to(dtype) * (code - less).to(dtype)


def _q4_k(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    scale, minimum = _six_bits(each, i // 32, dtype)
    code = each[:, :, 16 + i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15
    return _float16(each, 0, dtype) * scale * code.to(dtype) - _float16(each, 2, dtype) * minimum


def _q5_k(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    scale, minimum = _six_bits(each, i // 32, dtype)
    code = each[:, :, 48 + i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15
    code = code + 16 * (each[:, :, 16 + i % 32] >> (i // 32) & 1)
    return _float16(each, 0, dtype) * scale * code.to(dtype) - _float16(each, 2, dtype) * minimum


def _q6_k(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    half, place = i // 128, i % 128
    low = each[:, :, 64 * half + place % 64] >> (place // 64 * 4)
    high = each[:, :, 128 + 32 * half + place % 32] >> (place // 32 * 2)
    code = (low % 16 + high % 4 * 16 - 32).to(dtype)
    return _float16(each, 208, dtype) * _signed(each[:, :, 192 + i // 16]).to(dtype) * code


def _iq4_xs(each: Tensor, i: Tensor, dtype: torch.dtype) -> Tensor:
    j = i // 32
    low = each[:, :, 4 + j // 2] >> (j % 2 * 4) & 15
    scale = low + 16 * (each[:, :, 2 + j // 4] >> (j % 4 * 2) & 3) - 32
    code = each[:, :, 8 + j * 16 + i % 16] >> (i // 16 % 2 * 4) & 15
    return _float16(each, 0, dtype) * scale.to(dtype) * _book(code, dtype)


DECODERS: Mapping[str, Decode] = {
    "Q8_0": lambda each, i, dtype: _float16(each, 0, dtype) * _signed(each[:, :, 2 + i]).to(dtype),
    "Q4_0": lambda each, i, dtype: _float16(each, 0, dtype) * (_nibble(each, 2, i) - 8).to(dtype),
    "Q4_1": lambda each, i, dtype: (
        _float16(each, 0, dtype) * _nibble(each, 4, i).to(dtype) + _float16(each, 2, dtype)
    ),
    "Q5_0": _q5, "Q5_1": _q5, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": lambda each, i, dtype: _float16(each, 0, dtype) * _book(_nibble(each, 2, i), dtype),
    "IQ4_XS": _iq4_xs,
}  # fmt: skip
