"""Random weights in each kind of pack that the CPU's kernels read, and calls of packed_linear with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.codebooks import CODEBOOKS, E8M0
from accelpatch.kernels.layouts.cpu_pack import FORMS, Pack

FORMATS = (
    "int8", "int8-group32", "int8-group64", "int4", "int4-group32", "int4-minimum64", "int4-minimum-half32",
    "int3-group32", "int3-minimum-half64", "int3-zero32",
)  # fmt: skip
ZEROS = ("int4-zero", "int4-zero32", "int4-zero-half64", "int4-zero-order-half32", "int4-zero-half16")
TABLES = ("nf4", "nf4-half64", "fp4-group32", "fp4-order64", "e2m1-group32")
SIXTEEN = ("int8-group16", "int4-group16", "int4-minimum-half16")
FOREIGN = (*ZEROS, *TABLES, *SIXTEEN, "Q4_K", "Q6_K", "int8-order")
GROUPS = {"Q4_K": 32, "Q6_K": 16}

Canonical = tuple[Tensor, Tensor, Any, Tensor | None, Tensor]


def bits_of(format_: str) -> int:
    """Of a code."""
    return 8 if "int8" in format_ else 3 if "int3" in format_ else 4


def group_of(format_: str) -> int | None:
    return next((size for size in (16, 32, 64) if format_.endswith(str(size))), GROUPS.get(format_))


def canonical(format_: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Canonical:
    """x, q, scale, offset, bias; of superblocks their bytes as q, and scale None."""
    g = torch.Generator().manual_seed(seed)
    group = group_of(format_) or k
    x, bias = torch.randn(m, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
    if format_ in GROUPS:
        return x, superblocks(format_, n, k, g), None, None, bias
    scale = (torch.rand(n, k // group, generator=g) + 0.5) / k**0.5 / 16
    if format_.startswith("int8"):
        q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        return x, q, scale, None, bias
    offset = -8 * scale + torch.randn(scale.shape, generator=g) * scale if "minimum" in format_ else None
    if "zero" in format_:
        offset = torch.randint(0, 17, scale.shape, generator=g, dtype=torch.int8)
    if format_.startswith("e2m1"):
        scale = scale.to(E8M0)
    if "half" in format_:
        scale, offset = scale.half(), offset.half() if "minimum" in format_ else offset
    q = torch.randint(-128, 128, (n, k * bits_of(format_) // 8), generator=g, dtype=torch.int8)
    return x, q, scale, offset, bias


def superblocks(format_: str, n: int, k: int, g: torch.Generator) -> Tensor:
    """Random bytes with d and dmin of a size that makes weights of about 1 / sqrt(k)."""
    size = FORMS[format_][1]
    blocks = torch.randint(0, 256, (n, k // 256, size), generator=g, dtype=torch.uint8)
    halves = ((torch.rand(n, k // 256, 2, generator=g) + 0.5) / k**0.5 / 1000).half().view(torch.uint8)
    if format_ == "Q4_K":
        blocks[..., :4] = halves
    else:
        blocks[..., -2:] = halves[..., :2]
    return blocks.flatten(1)


def packed(format_: str, q: Tensor, scale: Any, offset: Tensor | None) -> Pack:
    if format_ in GROUPS:
        return Pack.of_blocks(q, q.shape[1] // FORMS[format_][1] * 256, format_)
    codes = next((codes for codes in CODEBOOKS if format_.startswith(codes)), "")
    bits = bits_of(format_)
    k = q.shape[1] * 8 // bits
    order = torch.randperm(k, generator=torch.Generator().manual_seed(5)) if "order" in format_ else None
    return Pack.pack(q, scale, offset, bits=bits, codes=codes, order=order)


def operands(
    format_: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[str, tuple[Any, ...]]:
    """(op, arguments with the pack among them)."""
    x, q, scale, offset, bias = canonical(format_, m, n, k, dtype, seed)
    return "packed_linear", (x, *packed(format_, q, scale, offset).arguments(), bias)


def size_for(format_: str, m: int, n: int, k: int) -> tuple[int, int, int]:
    """k made to fit the format's groups and whole bytes; at least 5 rows of a long k: one sum of torch may be lucky."""
    unit = 256 if format_ in GROUPS else group_of(format_) or (16 if format_ == "nf4" else 2)
    return m, max(n, 5) if unit == 256 else n, max(unit, k // unit * unit)
