"""Experts in operations that have gradients, one expert after the other: what the backward pass computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.codebooks import FP8_CODES
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int4Rows, Int8Rows, Plain
from accelpatch.kernels.ops.linear.by_layout import linear

#: (number of an expert, its rows of x) -> their product with its matrix, and its bias
Linear = Callable[[int, Tensor], Tensor]


def of_stack(stack: Stack, k: int, *, interleaved: bool) -> Linear:
    """The products with matrices [N, k] of a Stack. interleaved: whether rows of tiles are those of gate and up."""

    def linear_of(number: int, x: Tensor) -> Tensor:
        canonical = stack.expert(number).canonical(k, interleaved=interleaved)
        q, scale, offset, bias = (None if one is None else one[0] for one in canonical)
        assert q is not None
        if scale is None:
            return linear(x, Plain(q), bias)
        if stack.codes == FP8_CODES:
            return linear(x, Fp8Rows(q, scale), bias)
        weight = Int8Rows(q, scale) if stack.bits == 8 else Int4Rows(q, scale, offset, stack.codes)
        return linear(x, weight, bias)

    return linear_of


def of_pack(pack: ExpertPack) -> Linear:
    """The products with the matrices of an ExpertPack."""

    def linear_of(number: int, x: Tensor) -> Tensor:
        one = pack.of(number)
        return linear(x, one, one.bias)

    return linear_of


def with_low_rank(base: Linear, factors: Sequence[tuple[Tensor, Tensor]]) -> Linear:
    """base plus LoRA: up[e] @ (down[e] @ x) is added for each pair of down[E, r, K] and up[E, N, r]."""

    def both(number: int, x: Tensor) -> Tensor:
        y = base(number, x)
        for down, up in factors:
            y = y + functional.linear(functional.linear(x, down[number].to(x.dtype)), up[number].to(x.dtype))
        return y

    return both


def by_linears(up: Linear, down: Linear, gate: Callable[[Tensor], Tensor]) -> Any:
    """(number, x) -> what an expert makes of its rows."""
    return lambda number, x: down(number, gate(up(number, x)))
