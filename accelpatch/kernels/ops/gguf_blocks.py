"""Weights in the superblocks of 256 values that GGUF's Q4_K and Q6_K store, as floats, in plain torch.

    Q4_K   144 bytes: d, dmin (float16), 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles
           w = (d * scale[j]) * q - (dmin * minimum[j])     8 groups of 32
    Q6_K   210 bytes: 128 bytes of low nibbles, 64 of upper bit pairs, 16 int8 scales, d (float16)
           w = (d * scale[j]) * (q - 32)                    16 groups of 16

Source: the block formats of ggml.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPERBLOCK = 256
BYTES = {"Q4_K": 144, "Q6_K": 210}  # of a superblock
GROUPS = {"Q4_K": 32, "Q6_K": 16}  # values that share a scale


def dense(form: str, dtype: torch.dtype, blocks: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K] of blocks[N, bytes a row] uint8, computed in float32 or wider, in `dtype`; and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    superblocks = blocks.unflatten(1, (-1, BYTES[form]))
    weight = (_q4_k if form == "Q4_K" else _q6_k)(superblocks, wide)
    return weight.flatten(1).to(dtype), None if bias is None else bias.to(dtype)


def _half(two_bytes: Tensor, wide: torch.dtype) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).to(wide)


def _q4_k(blocks: Tensor, wide: torch.dtype) -> Tensor:
    """[N, superblocks, 256]."""
    d, dmin, s = _half(blocks[..., :2], wide), _half(blocks[..., 2:4], wide), blocks[..., 4:16]
    first, second, third = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1).to(wide)
    minimum = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), -1).to(wide)
    nibbles = blocks[..., 16:].unflatten(-1, (4, 32))
    q = torch.stack((nibbles & 15, nibbles >> 4), -2).flatten(-3, -2).to(wide)  # [N, superblocks, 8, 32]
    return ((d * scale)[..., None] * q - (dmin * minimum)[..., None]).flatten(-2)


def _q6_k(blocks: Tensor, wide: torch.dtype) -> Tensor:
    """[N, superblocks, 256]."""
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    scale = blocks[..., 192:208].contiguous().view(torch.int8).to(wide) * _half(blocks[..., 208:], wide)
    nibbles = torch.stack((low & 15, low >> 4), -3)  # [N, superblocks, half, which nibble, which 32 bytes, 32]
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    q = nibbles.flatten(-3, -2) | ((high >> shift) & 3) << 4
    return (scale[..., None] * (q.flatten(-3).unflatten(-1, (16, 16)).to(wide) - 32)).flatten(-2)
