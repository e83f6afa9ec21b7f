"""Linear layer with a 3-bit weight: y[M, N] = x[M, K] @ w[N, K]^T + bias[N], codes u in 0..7, groups along K.

    offset None               w = (u - 4) * scale           symmetric
    offset[N, G] float        w = u * scale + offset        minimum
    offset[N, G] integer      w = (u - offset) * scale      zero point (GPTQ)

Packed q[N, 3 K / 8]: eight codes in three bytes, code k of a row from its bit 3 k on, low bits first, as in the words
of GPTQ. Stored as torch.int8, as bits. K is a multiple of 8.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.layouts.row_major import Int3Rows
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec

OP = "int3_linear"
CODES, BYTES = 8, 3  # codes that lie in whole bytes together, and the bytes


def pack(u: Tensor) -> Tensor:
    """Pack u[N, K] or [N, G, K / G], integers 0..7 of any dtype, to q[N, 3 K / 8] int8."""
    fields = u.flatten(1).unflatten(1, (-1, CODES)).to(torch.int32)
    word = sum(fields[..., i] << (3 * i) for i in range(CODES))
    assert isinstance(word, Tensor)
    return torch.stack([word >> (8 * i) & 255 for i in range(BYTES)], -1).flatten(1).to(torch.uint8).view(torch.int8)


def unpack(q: Tensor) -> Tensor:
    """u[N, K] int8 in 0..7 from packed q[N, 3 K / 8]."""
    each = (q.to(torch.int32) & 255).unflatten(1, (-1, BYTES))
    word = each[..., 0] | each[..., 1] << 8 | each[..., 2] << 16
    return torch.stack([word >> (3 * i) & 7 for i in range(CODES)], -1).flatten(1).to(torch.int8)


def dequantize_rows(q: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w[N, K] in `dtype` from packed rows."""
    groups, s = unpack(q).unflatten(1, (scale.shape[1], -1)).to(dtype), scale.to(dtype).unsqueeze(2)
    if offset is None:
        return groups.sub_(4).mul_(s).flatten(1)
    shift = offset.to(dtype).unsqueeze(2)
    return (groups.mul_(s).add_(shift) if offset.is_floating_point() else groups.sub_(shift).mul_(s)).flatten(1)


def dense(
    dtype: torch.dtype, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], decoded in float32 or wider and rounded to `dtype`, and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    byte = q.view(torch.uint8)
    every = torch.stack([byte.bitwise_right_shift(i).bitwise_and(1) for i in range(8)], -1)  # bits, the low one first
    three = every.view(q.shape[0], -1, 3).to(wide)
    u = three[..., 0] + 2 * three[..., 1] + 4 * three[..., 2]
    groups, s = u.view(q.shape[0], scale.shape[1], -1), scale.to(wide)[:, :, None]
    if offset is None:
        groups.sub_(4).mul_(s)
    elif offset.is_floating_point():
        groups.mul_(s).add_(offset.to(wide)[:, :, None])
    else:
        groups.sub_(offset.to(wide)[:, :, None]).mul_(s)
    return u.to(dtype), None if bias is None else bias.to(dtype)


def reference(x: Tensor, *weight: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *weight))


def blocks(*args: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *weight, bias = args
    return common.blocks_of(Int3Rows(*weight), dense, bias)


def spec(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(q.dim() == 2 and q.shape[1] % BYTES == 0, OP, f"q is [N, 3 K / 8], not {list(q.shape)}")
    return common.spec(OP, x, q, 3, scale, offset, bias)


def by_torch(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        # in float32 at least: u * scale + offset loses its low bits where it is rounded twice
        offsets = None if offset is None else offset[start:stop]
        return dequantize_rows(q[start:stop], scale[start:stop], offsets, torch.promote_types(dtype, torch.float32))

    return common.by_row_blocks(x, q.shape[0], q.shape[1] // BYTES * CODES, rows, bias)


@operation(OP)
def int3_linear(
    x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias, with w dequantised by the kind of `offset` (see the module).

    x[..., K] float; q[N, 3 K / 8] packed, int8; scale[N, G] float, G dividing K; offset[N, G] None, float or integer;
    bias[N] float or None. y has x's dtype, contiguous. Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, q, scale, offset, bias))
    return y


int3_linear.register_fake(common.rows_like(spec))
gradient.differentiate(int3_linear, Int3Rows, partial(gradient.of_rows, dense=dense))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes and each kind of offset."""

    def case(m: int, n: int, k: int, groups: int, bias: bool, kind: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, scale, b = common.operands(generator, dtype, device, m, n, k, groups, bias)
            scale = (scale / 4).to(torch.float16)
            q = torch.randint(-128, 128, (n, k // CODES * BYTES), generator=generator, dtype=torch.int8).to(device)
            offset = None
            if kind == "minimum":
                offset = -4 * scale
            elif kind == "zero_point":
                offset = torch.randint(0, 8, scale.shape, generator=generator, dtype=torch.int8).to(device)
            return x, q, scale, offset, b

        return Case(f"m{m}-n{n}-k{k}-g{k // groups}-{kind}{'-bias' if bias else ''}", make)

    kinds = ("none", "minimum", "zero_point")
    whole = [(m, n, max(k // CODES, 1) * CODES, g, bias) for m, n, k, g, bias in common.SIZES]
    return [case(*size, kind=kinds[i % 3]) for i, size in enumerate(whole)]


KERNELS = {
    OP: Kernel(int3_linear, reference, spec, {"torch": Implementation(by_torch, dispatch.anywhere)}, cases, blocks)
}
