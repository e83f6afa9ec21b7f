"""The formats of quantised weights by name and by canonical layout: from tensors, from floats, and to floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int3Rows, Int4Rows, Int8Rows, RowMajor
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear import by_layout
from accelpatch.quant import codebook, fp8, int3, int4, int8


def _int4_as(weight: Tensor, like: Int4Rows) -> Int4Rows:
    group = like.k // like.scale.shape[1]
    if like.codes:
        return codebook.quantize(weight, group_size=group, codebook=like.codes)
    kind = like.kind
    return int4.quantize(weight, group_size=group, symmetric=kind == "none", zero_point=kind == "zero_point")


def _int3_as(weight: Tensor, like: Int3Rows) -> Int3Rows:
    group, kind = like.k // like.scale.shape[1], like.kind
    return int3.quantize(weight, group_size=group, symmetric=kind == "none", zero_point=kind == "zero_point")


def _w8a8_as(weight: Tensor, like: W8A8Rows) -> W8A8Rows:
    if like.w.dtype == torch.int8:
        return W8A8Rows(*int8.quantize(weight).arguments(), like.input_scale)
    return W8A8Rows(*fp8.quantize(weight, fnuz=like.w.dtype == torch.float8_e4m3fnuz).arguments())


def _refuse(weight: Tensor, like: GgufBlocks) -> GgufBlocks:
    raise KernelError(f"{like.form} is read from GGUF files and not made: floats cannot be written into this weight")


FORMATS: Mapping[type, Callable[[Tensor, Any], RowMajor]] = {
    Int8Rows: int8.quantize_as,
    Int4Rows: _int4_as,
    Int3Rows: _int3_as,
    Fp8Rows: fp8.quantize_as,
    W8A8Rows: _w8a8_as,
    GgufBlocks: _refuse,
}


#: what a checkpoint that is exported calls a format -> its canonical layout
KINDS: Mapping[str, type[RowMajor]] = {"int3": Int3Rows, "int4": Int4Rows, "int8": Int8Rows, "w8a8": W8A8Rows}


def weight_of(kind: str, parts: Mapping[str, Tensor | None]) -> Any:
    """The canonical weight of a checkpoint's tensors. kind: a key of KINDS; any other is a form of 8-bit floats."""
    return KINDS.get(kind, Fp8Rows).of(parts)


def quantize_as(weight: Tensor, like: RowMajor) -> RowMajor:
    """Quantise a float weight [N, K] to the format, the group size and the order of columns of `like`, of its shape.

    Raises KernelError for values that the format cannot hold, and for a format that is not made.
    """
    if like.order is None:
        return FORMATS[type(like)](weight, like)
    return FORMATS[type(like)](weight[:, like.order.long()], like).replace(order=like.order)


def dequantize(weight: RowMajor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w[N, K] in `dtype`, computed in float32 or wider and rounded once; columns in the order of the inputs."""
    return by_layout.dequantized(weight, dtype)
