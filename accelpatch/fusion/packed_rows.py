"""The rows of a batch's tokens without its padding, and attention over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Packing:
    """The rows of one call. rows: places of tokens among all B L. edges: int32[B + 1], where sequences begin among
    them; lengths: the same as lengths. shape: (B, L). stacks: id of a layer -> (its place in
    its stack, the last one, what it computes).
    """

    rows: Tensor
    edges: Tensor
    lengths: tuple[int, ...]
    shape: tuple[int, int]
    stacks: Mapping[int, tuple[int, int, Any]]

    def gather(self, x: Tensor) -> Tensor:
        """x[B, L, K] -> [T, K]."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.rows)

    def scatter(self, y: Tensor) -> Tensor:
        """y[T, K] -> [B, L, K], with zeros at padded places."""
        batch, length = self.shape
        return y.new_zeros(batch * length, y.shape[-1]).index_copy_(0, self.rows, y).view(batch, length, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of each sequence over itself, q, k, v[T, H, D] -> [T, H, D]."""
        if q.is_cuda:
            longest = max(self.lengths)
            args = (q, k, v, self.edges, self.edges, longest, longest, 0.0, False, False)
            made: Tensor = torch.ops.aten._flash_attention_forward(*args, scale=scale)[0]
            return made
        parts = zip(*(one.split(self.lengths) for one in (q, k, v)), strict=True)
        return torch.cat([_attend_one(*one, scale=scale) for one in parts])


def _attend_one(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


class _Call(threading.local):
    packing: Packing | None = None


_CALL = _Call()


def present() -> Packing | None:
    """The packing of the call that this thread is in."""
    return _CALL.packing


@contextmanager
def without_padding(packing: Packing) -> Iterator[None]:
    """Context manager: layers of its stacks run on packed rows."""
    _CALL.packing = packing
    try:
        yield
    finally:
        _CALL.packing = None
