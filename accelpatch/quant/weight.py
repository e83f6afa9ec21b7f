"""Shared by all weight formats: the tuple that holds a quantised weight, and checks of its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from accelpatch.errors import KernelError

BLOCK = 1 << 18  # elements per block of rows


class QuantizedWeight(NamedTuple):
    """q[N, K] int8 or float8 (4-bit: [N, K / 2], two values per int8), scale[N, G] float, offset[N, G] or None."""

    q: Tensor
    scale: Tensor
    offset: Tensor | None


class OrderedWeight(NamedTuple):
    """As a QuantizedWeight with its columns in another order: column j is that of input order[j], int32[K].

    GPTQ's act-order: the inputs of a group lie side by side.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None
    order: Tensor


class W8A8Weight(NamedTuple):
    """As a QuantizedWeight in int8 with one scale a row; input_scale[1] float32: of its input, None for one a token."""

    q: Tensor
    scale: Tensor
    offset: None = None
    input_scale: Tensor | None = None


AnyWeight = QuantizedWeight | OrderedWeight | W8A8Weight
PARTS = ("q", "scale", "offset", "order", "input_scale")  # of all of them, as checkpoints name them


def weight_of(parts: Mapping[str, Tensor | None]) -> AnyWeight:
    """A quantised weight from its tensors by name, which say what it is."""
    has = {name for name, tensor in parts.items() if tensor is not None}
    kind: Any = OrderedWeight if "order" in has else W8A8Weight if "input_scale" in has else QuantizedWeight
    return cast(AnyWeight, kind(**{name: parts.get(name) for name in kind._fields}))


def check_finite(weight: Tensor, name: str) -> None:
    """Raise KernelError, naming the first bad element, where `weight` holds NaN or infinity."""
    if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():  # NaN propagates; makes no copy of the weight
        bad = ~torch.isfinite(weight)
        place, count = [int(i) for i in bad.nonzero()[0]], int(bad.sum())
        raise KernelError(
            f"{name}{place} is {weight[tuple(place)].item()}, and {count} of {weight.numel()} values are not finite: "
            "a quantised weight cannot hold it; mend the checkpoint, or keep this site in the recipe (replace: keep)"
        )


def grouped(weight: Tensor, group_size: int | None, format_name: str) -> Tensor:
    """weight[N, K] as float32 groups [N, G, group_size]; None: one per row. KernelError where K does not divide."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise KernelError(f"{format_name} takes a float weight [N, K], not {weight.dtype} {list(weight.shape)}")
    size = weight.shape[1] if group_size is None else group_size
    if size < 1 or weight.shape[1] % size:
        raise KernelError(
            f"{format_name}: group_size {size} does not divide K = {weight.shape[1]}: choose one that does"
        )
    check_finite(weight, "weight")
    return weight.detach().to(torch.float32).contiguous().unflatten(1, (-1, size))


def row_blocks(groups: Tensor) -> tuple[Tensor, ...]:
    """Split groups [N, G, group_size] into blocks of rows that fit a CPU's cache."""
    return groups.split(max(1, BLOCK // (groups.shape[1] * groups.shape[2]))) if groups.is_cpu else (groups,)


def check_held(
    held: AnyWeight, n: int | None, k: int | None, codes: tuple[torch.dtype, ...],
    floats: tuple[torch.dtype, ...], per_byte: int = 1, zero_code: int | None = 0,
) -> None:  # fmt: skip
    """Raise KernelError unless a weight from a file is one [N, K] of these dtypes, with scales that can be.

    per_byte: values in a byte of q. zero_code: what q holds for a value of zero, where there is no offset; None where
    a scale of zero may have any codes. An offset is of a scale's dtypes, or int8.
    """
    q, scale, offset = held[:3]
    if q.dtype not in codes or n is None or k is None or list(q.shape) != [n, k // per_byte]:
        raise KernelError(f"q is {q.dtype} {list(q.shape)}, and {codes[0]} {[n, (k or 0) // per_byte]} belongs here")
    for name, one in (("scale", scale), ("offset", offset)):
        if one is None:
            continue
        groups = one.shape[1] if one.dim() == 2 else 0
        dtypes = (*floats, torch.int8) if name == "offset" else floats
        if one.dtype not in dtypes or one.shape[0] != n or not groups or k % groups or one.shape != scale.shape:
            raise KernelError(f"{name} is {one.dtype} {list(one.shape)}, and {floats[0]} [{n}, G] belongs here")
        if not bool(torch.isfinite(one).all()):
            place = [int(i) for i in (~torch.isfinite(one)).nonzero()[0]]
            raise KernelError(f"{name}{place} is {one[tuple(place)].item()}: write the checkpoint again")
    if offset is None and zero_code is not None and bool((zero := scale == 0).any()):
        codes_there = q.unflatten(1, (scale.shape[1], -1))[zero].to(torch.float32)
        if bool((codes_there != zero_code).any()):
            raise KernelError("scale has a zero where the codes in q are not zero: write the checkpoint again")
    if isinstance(held, OrderedWeight):
        check_order(held.order, k)


def check_order(order: Tensor, k: int) -> None:
    """Raise KernelError unless `order` has each of k inputs once."""
    if order.shape != (k,) or order.dtype != torch.int32:
        raise KernelError(f"order is {order.dtype} {list(order.shape)}, and int32 [{k}] belongs here")
    if not torch.equal(order.sort().values, torch.arange(k, dtype=torch.int32, device=order.device)):
        raise KernelError(f"order does not have each of {k} inputs once: write the checkpoint again")
