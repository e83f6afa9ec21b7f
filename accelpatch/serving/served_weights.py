"""Operations on weights that an engine's layers hold by a number: torch.compile, which engines run over whole models,
sees one operation each and nothing of the layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.ops.linear.by_layout import embedded, linear

_HELD: list[Any] = []


def hold(layout: Any) -> int:
    """Keep a layout for the life of the process; returns its number."""
    _HELD.append(layout)
    return len(_HELD) - 1


@torch.library.custom_op("accelpatch::served_linear", mutates_args=())
def served_linear(x: Tensor, bias: Tensor | None, number: int, rows: int) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, of the weight of a number; rows: its N."""
    return linear(x, _HELD[number], bias)


@served_linear.register_fake
def _(x: Tensor, bias: Tensor | None, number: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.custom_op("accelpatch::served_embedding", mutates_args=())
def served_embedding(ids: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., K] in `dtype` of the table of a number; ids[...]."""
    return embedded(ids, _HELD[number], dtype)


@served_embedding.register_fake
def _(ids: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, _HELD[number].k, dtype=dtype)
