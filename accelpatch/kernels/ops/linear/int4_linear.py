"""Linear layer with a 4-bit weight: y[M, N] = x[M, K] @ w[N, K]^T + bias[N], codes u in 0..15, groups along K.

    offset None               w = (u - 8) * scale           symmetric
    offset[N, G] float        w = u * scale + offset        minimum (GGUF Q4_1)
    offset[N, G] integer      w = (u - offset) * scale      zero point (GPTQ, AWQ)
    codes                     w = BOOK[u] * scale           a table of codebooks.py (nf4, fp4), with float32 scales
    codes nvfp4               w = BOOK[u] * (scale * offset)    scale in e4m3, offset[N, 1] a factor for each row

Packed q[N, K / 2]: two codes per byte, the even k in the low nibble. Stored as torch.int8 (as bits): code that looks at
a weight's dtype takes torch.uint8 for a mask or an image.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, NVFP4
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec

OP = "int4_linear"


def dense(
    dtype: torch.dtype, q: Tensor, scale: Tensor, offset: Tensor | None = None, codes: str = "",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The weight[N, K], decoded in float32 or wider and rounded to `dtype`, and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    u = torch.empty(q.shape[0], 2 * q.shape[1], dtype=wide, device=q.device)
    byte = q.to(torch.int16).remainder_(256)
    u[:, 0::2] = byte.remainder(16)
    u[:, 1::2] = byte.div_(16, rounding_mode="floor")
    if codes:
        u = torch.tensor(CODEBOOKS[codes], dtype=torch.float32, device=q.device).to(wide)[u.long()]
    groups, s = u.view(q.shape[0], scale.shape[1], -1), scale.to(wide)
    if codes == NVFP4 and offset is not None:
        s = offset.mul(scale.to(torch.float64)).to(wide)
    s = s[:, :, None]
    if codes:
        groups.mul_(s)
    elif offset is None:
        groups.sub_(8).mul_(s)
    elif offset.is_floating_point():
        groups.mul_(s).add_(offset.to(wide)[:, :, None])
    else:
        groups.sub_(offset.to(wide)[:, :, None]).mul_(s)
    return u.to(dtype), None if bias is None else bias.to(dtype)


def _scales(scale: Tensor, offset: Tensor | None, codes: str, dtype: torch.dtype) -> Tensor:
    """scale[N, G] in `dtype`, of nvfp4 times the rows' factors."""
    if codes == NVFP4 and offset is not None:
        return (scale.double() * offset).to(dtype)  # a factor may be 1 over what a file has: the quotient, rounded once
    return scale.to(dtype)


def reference(x: Tensor, *weight: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *weight))


def blocks(*args: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *weight, bias = args
    return common.blocks_of(Int4Rows(*weight), dense, bias)


def spec(
    x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, codes: str = "", bias: Tensor | None = None
) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(codes in ("", *CODEBOOKS), OP, f"codes are of {', '.join(CODEBOOKS)}, not {codes!r}")
    if codes == NVFP4:
        fits = offset is not None and offset.dtype == torch.float64 and scale.dtype == E4M3
        require(fits, OP, "nvfp4 has scales in e4m3, and a factor for each row in float64")
    else:
        require(not codes or offset is None, OP, f"{codes} has no offset")
    found = common.spec(OP, x, q, 4, scale, offset, bias)
    return replace(found, offset=codes) if codes else found


def unpack(q: Tensor) -> Tensor:
    """u[N, K] int8 in 0..15 from packed q[N, K / 2]."""
    return torch.stack((q & 15, (q >> 4) & 15), dim=-1).flatten(-2)


def dequantize_rows(q: Tensor, scale: Tensor, offset: Tensor | None, codes: str, dtype: torch.dtype) -> Tensor:
    """w[N, K] in `dtype` from packed rows."""
    groups = unpack(q).unflatten(1, (scale.shape[1], -1))
    s = _scales(scale, offset, codes, dtype).unsqueeze(2)
    if codes:
        book = torch.tensor(CODEBOOKS[codes], dtype=dtype, device=q.device)
        return book[groups.int()].mul_(s).flatten(1)
    if offset is None:
        return (groups - 8).to(dtype).mul_(s).flatten(1)
    shift = offset.to(dtype).unsqueeze(2)
    if offset.is_floating_point():
        return groups.to(dtype).mul_(s).add_(shift).flatten(1)
    return groups.to(dtype).sub_(shift).mul_(s).flatten(1)


def by_torch(
    x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, codes: str = "", bias: Tensor | None = None
) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        # in float32 at least: u * scale + offset loses its low bits where it is rounded twice
        wide = torch.promote_types(dtype, torch.float32)
        offsets = None if offset is None else offset[start:stop]
        return dequantize_rows(q[start:stop], scale[start:stop], offsets, codes, wide)

    return common.by_row_blocks(x, q.shape[0], 2 * q.shape[1], rows, bias)


@operation(OP)
def int4_linear(
    x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, codes: str = "", bias: Tensor | None = None
) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias, with w dequantised by `codes` or the kind of `offset` (see the module).

    x[..., K] float; q[N, K / 2] packed, int8; scale[N, G] float, G dividing K; offset[N, G] None, float or integer;
    bias[N] float or None. y has x's dtype, contiguous. Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, q, scale, offset, codes, bias))
    return y


int4_linear.register_fake(common.rows_like(spec))
gradient.differentiate(int4_linear, Int4Rows, partial(gradient.of_rows, dense=dense))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, each kind of offset and each codebook."""

    def case(m: int, n: int, k: int, groups: int, bias: bool, kind: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, scale, b = common.operands(generator, dtype, device, m, n, k, groups, bias)
            codes = kind if kind in CODEBOOKS else ""
            scale, offset = common.of_codes(scale, codes) if codes else ((scale / 8).to(torch.float16), None)
            q = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8).to(device)
            if kind == "minimum":
                offset = -8 * scale
            elif kind == "zero_point":
                offset = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.int8).to(device)
            return x, q, scale, offset, codes, b

        return Case(f"m{m}-n{n}-k{k}-g{k // groups}-{kind}{'-bias' if bias else ''}", make)

    kinds = ("none", "minimum", "zero_point")
    plain = [case(*size, kind=kinds[i % 3]) for i, size in enumerate(common.SIZES)]
    return plain + [case(*size, kind=tuple(CODEBOOKS)[i % len(CODEBOOKS)]) for i, size in enumerate(common.SIZES)]


KERNELS = {
    OP: Kernel(int4_linear, reference, spec, {"torch": Implementation(by_torch, dispatch.anywhere)}, cases, blocks)
}
