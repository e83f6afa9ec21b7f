"""Tensors as a pack of the CPU takes them: memory at multiples of 64 bytes, float32, bytes, an order of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.native_library import native

P = TypeVar("P", bound=Any)
ALIGNED = 64  # bytes that a pack's memory begins at a multiple of


def aligned(size: int) -> Tensor:
    """uint8 memory aligned to 64 bytes."""
    whole = torch.empty(size + ALIGNED - 1, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % ALIGNED
    return whole[start : start + size]


def realigned(data: Tensor) -> Tensor:
    """The same bytes at a multiple of 64."""
    if data.data_ptr() % ALIGNED == 0 or data.dtype != torch.uint8:
        return data
    return aligned(data.numel()).copy_(data)


def in_one_block(packs: Sequence[P]) -> list[P]:
    """Packs with their `data` in one block, in this order, on huge pages where the system has them.

    A step that reads them in order then reads one stream.
    """
    sizes = [-(-one.data.nbytes // ALIGNED) * ALIGNED for one in packs]
    block = aligned(sum(sizes))
    native().ap_advise_large_pages(block.data_ptr(), len(block))
    moved = []
    for one, place in zip(packs, block.split(sizes), strict=True):
        data = place[: one.data.nbytes].view(one.data.dtype).view(one.data.shape)
        moved.append(replace(one, data=data.copy_(one.data)))
    return moved


def is_one_block(packs: Sequence[Any]) -> bool:
    """Whether packs lie one behind the other as `in_one_block` leaves them."""
    places = [(one.data.data_ptr(), -(-one.data.nbytes // ALIGNED) * ALIGNED) for one in packs]
    follow = all(at + size == next for (at, size), (next, _) in pairwise(places))
    return follow and len({one.data.untyped_storage().data_ptr() for one in packs}) <= 1


def as_float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def as_zero_points(offset: Tensor | None) -> Tensor | None:
    """As bytes; factors of rows, float64, as they are. Raises KernelError for one outside of 0..16."""
    if offset is None or offset.dtype == torch.float64:
        return None if offset is None else offset.contiguous()
    if offset.numel() and not 0 <= int(offset.min()) <= int(offset.max()) <= 16:
        raise KernelError(f"zero points of 4 bits are 0 to 16, not {int(offset.min())} to {int(offset.max())}")
    return offset.to(torch.int8).contiguous()


def as_order(order: Tensor | None, k: int) -> Tensor | None:
    """As int32. Raises KernelError where it does not name each of k columns once."""
    if order is None:
        return None
    fits = order.shape == (k,) and not order.is_floating_point()
    if not fits or not torch.equal(order.long().sort().values, torch.arange(k)):
        raise KernelError(f"the order of a weight's columns is a permutation of 0 to {k - 1}")
    return order.to(torch.int32).contiguous()


def is_half(*tensors: Tensor | None) -> bool:
    """Whether float16 represents all of these float32 values exactly."""
    return all(bool((t.half().float() == t).all()) for t in tensors if t is not None)
