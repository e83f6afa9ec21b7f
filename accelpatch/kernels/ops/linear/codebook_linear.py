"""Linear layer with 4-bit codes of a codebook: y[M, N] = x[M, K] @ (BOOK[u[N, K]] * scale[N, G])^T + bias[N].

Groups along K; BOOK: one of codebooks.py (nf4, fp4), in float32. Packed q[N, K / 2] as of int4_linear: the even
k in the low nibble. x may have any leading dimensions; y has its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, int4_linear
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec

OP = "codebook_linear"


def dense(
    dtype: torch.dtype, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], decoded in float32 or wider and rounded to `dtype`, and the bias."""
    wide = torch.promote_types(dtype, torch.float32)
    byte = q.to(torch.int16) & 255
    book = torch.tensor(CODEBOOKS[codebook], dtype=torch.float32, device=q.device).to(wide)
    values = book[torch.stack((byte % 16, byte // 16), -1).flatten(1).long()]
    values = values.view(len(q), scale.shape[1], -1) * scale.to(wide)[:, :, None]
    return values.flatten(1).to(dtype), None if bias is None else bias.to(dtype)


def reference(x: Tensor, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, q, scale, codebook, bias))


def blocks(q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""

    def of_book(dtype: torch.dtype, q: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return dense(dtype, q, scale, codebook, bias)

    return common.float64_blocks(of_book, q, scale, bias)


def spec(x: Tensor, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(codebook in CODEBOOKS, OP, f"codebook is one of {', '.join(CODEBOOKS)}, not {codebook!r}")
    made = common.spec(OP, x, q, 2, scale, None, bias)
    return Spec(OP, made.sizes, made.dtype, made.scale_dtype, made.group_size, codebook)


def dequantize_rows(q: Tensor, scale: Tensor, codebook: str, dtype: torch.dtype) -> Tensor:
    """w[N, K] in `dtype` from packed rows."""
    book = torch.tensor(CODEBOOKS[codebook], dtype=dtype, device=q.device)
    values = book[int4_linear.unpack(q).int()].unflatten(1, (scale.shape[1], -1))
    return values.mul_(scale.to(dtype).unsqueeze(2)).flatten(1)


def by_torch(x: Tensor, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return dequantize_rows(q[start:stop], scale[start:stop], codebook, wide)

    return common.by_row_blocks(x, q.shape[0], 2 * q.shape[1], rows, bias)


@operation(OP)
def codebook_linear(x: Tensor, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Tensor:
    """y[..., N] = x[..., K] @ (BOOK[u] * scale)^T + bias.

    x[..., K] float; q[N, K / 2] packed, int8; scale[N, G] float, G dividing K; codebook: a key of CODEBOOKS; bias[N]
    float or None. y has x's dtype, contiguous. Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, q, scale, codebook, bias))
    return y


@codebook_linear.register_fake
def _fake(x: Tensor, q: Tensor, scale: Tensor, codebook: str, bias: Tensor | None = None) -> Tensor:
    spec(x, q, scale, codebook, bias)
    return x.new_empty((*x.shape[:-1], q.shape[0]))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, each codebook."""

    def case(m: int, n: int, k: int, groups: int, bias: bool, codebook: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x, scale, b = common.operands(generator, dtype, device, m, n, k, groups, bias)
            q = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8).to(device)
            return x, q, scale, codebook, b

        return Case(f"m{m}-n{n}-k{k}-g{k // groups}-{codebook}{'-bias' if bias else ''}", make)

    return [case(*size, codebook=tuple(CODEBOOKS)[at % 2]) for at, size in enumerate(common.SIZES)]


KERNELS = {
    OP: Kernel(codebook_linear, reference, spec, {"torch": Implementation(by_torch, dispatch.anywhere)}, cases, blocks)
}
