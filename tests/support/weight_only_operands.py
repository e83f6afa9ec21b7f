"""Arguments of weight-only products with many rows, for tests of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.quant import int4
from tests.support.interpreted import DEVICE


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a float32 weight and a bias."""
    generator = torch.Generator().manual_seed(m + n)
    x, w, bias = (torch.randn(*size, generator=generator) for size in ((m, k), (n, k), (n,)))
    return x.to(DEVICE, dtype), (w / k**0.5).to(DEVICE), bias.to(DEVICE, dtype)


def int8_args(m: int, n: int, k: int, dtype: torch.dtype, groups: int = 1, bias: bool = True) -> tuple[Any, ...]:
    x, w, beside = operands(m, n, k, dtype)
    scale = torch.rand(n, groups, generator=torch.Generator().manual_seed(1)).to(DEVICE) / 100
    return x, (w * 32 * k**0.5).clamp(-127, 127).to(torch.int8), scale, beside if bias else None


def fp8_args(m: int, n: int, k: int, dtype: torch.dtype, groups: int = 1, bias: bool = True) -> tuple[Any, ...]:
    x, q, scale, beside = int8_args(m, n, k, dtype, groups, bias)
    return x, (q * 3.5).to(torch.float8_e4m3fn), scale / 3.5, beside


def int4_args(
    m: int, n: int, k: int, dtype: torch.dtype, group: int | None = 128, kind: str = "minimum", bias: bool = True
) -> tuple[Any, ...]:
    x, w, beside = operands(m, n, k, dtype)
    weight = int4.quantize(w, group_size=group or k, symmetric=kind == "none")
    if kind == "zero_point":
        places = torch.randint(0, 16, weight.scale.shape, generator=torch.Generator().manual_seed(2))
        weight = weight.replace(offset=places.to(DEVICE))
    return x, *Tiles.pack(*weight), beside if bias else None
