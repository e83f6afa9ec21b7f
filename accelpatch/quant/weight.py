"""Shared by all weight formats: checks of what is quantised, and of what comes from a file."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E4M3
from accelpatch.kernels.layouts.row_major import RowMajor

PARTS = ("q", "scale", "offset", "order", "input_scale")  # tensors of all formats, as checkpoints name them
BLOCK = 1 << 18  # elements per block of rows


def fits_half(values: Tensor) -> bool:
    """Whether all values are zero or of normal size in float16."""
    half, size = torch.finfo(torch.float16), values.abs()
    return bool(((size <= half.max) & ((size >= half.smallest_normal) | (size == 0))).all())


def check_finite(weight: Tensor) -> None:
    """Raise KernelError, naming the first bad element, where `weight` holds NaN or infinity."""
    if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():  # NaN propagates; makes no copy of the weight
        bad = ~torch.isfinite(weight)
        place, count = [int(i) for i in bad.nonzero()[0]], int(bad.sum())
        raise KernelError(
            f"weight{place} is {weight[tuple(place)].item()}, and {count} of {weight.numel()} values are not finite: "
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
    check_finite(weight := weight.detach().to(torch.float32))  # a float64 may be beyond its range
    return weight.contiguous().unflatten(1, (-1, size))


def row_blocks(groups: Tensor) -> tuple[Tensor, ...]:
    """Split groups [N, G, group_size] into blocks of rows that fit a CPU's cache."""
    return groups.split(max(1, BLOCK // (groups.shape[1] * groups.shape[2]))) if groups.is_cpu else (groups,)


def check_weight(
    weight: RowMajor, n: int | None, k: int | None, codes: tuple[torch.dtype, ...], floats: tuple[torch.dtype, ...],
    zero_code: int | None = 0,
) -> None:  # fmt: skip
    """Raise KernelError unless a weight from a file is [n, k] and of these dtypes, and its scales are valid.

    codes, floats: the dtypes that q and the scales may have; offsets may be int8 as well. zero_code: the code of the
    value zero where there is no offset; codes whose scale is zero must be it. None: they may be anything.
    """
    tensors, bits = weight.tensors(), weight.bits
    q, scale, offset = tensors["q"], tensors["scale"], tensors.get("offset")
    if q.dtype not in codes or n is None or k is None or list(q.shape) != [n, k * bits // 8]:
        raise KernelError(f"q is {q.dtype} {list(q.shape)}, and {codes[0]} {[n, (k or 0) * bits // 8]} belongs here")
    for name, one in (("scale", scale), ("offset", offset)):
        if one is None:
            if scale.dtype == E4M3 and name == "offset":
                raise KernelError("offset is missing, the factors of rows: write the checkpoint again")
            continue
        if scale.dtype == E4M3 and name == "offset":
            if one.dtype != torch.float64 or list(one.shape) != [n, 1] or not bool(one.isfinite().all()):
                raise KernelError(f"offset is {one.dtype} {list(one.shape)}, and finite float64 {[n, 1]} belongs here")
            continue
        groups = one.shape[1] if one.dim() == 2 else 0
        dtypes = (*floats, torch.int8) if name == "offset" else floats
        if one.dtype not in dtypes or not groups or one.shape[0] != n or k % groups or one.shape != scale.shape:
            raise KernelError(f"{name} is {one.dtype} {list(one.shape)}, and {floats[0]} [{n}, G] belongs here")
        if not bool((finite := one.float().isfinite()).all()):  # 8-bit floats have no isfinite of their own
            place = [int(i) for i in (~finite).nonzero()[0]]
            raise KernelError(f"{name}{place} is {one[tuple(place)].float().item()}: write the checkpoint again")
    if offset is None and zero_code is not None and bool((zero := scale.float() == 0).any()):
        codes_there = q.unflatten(1, (scale.shape[1], -1))[zero].to(torch.float32)
        if bool((codes_there != zero_code).any()):
            raise KernelError("scale has a zero where the codes in q are not zero: write the checkpoint again")
    if (order := tensors.get("order")) is not None:
        check_order(order, k)


def check_input_scale(one: Tensor | None) -> None:
    """Raise KernelError unless `one` is the scale of an input, a number above zero, or None."""
    if one is not None and (one.dtype != torch.float32 or one.shape != (1,) or not 0 < float(one) < float("inf")):
        found = one.flatten()[:4].tolist()
        raise KernelError(f"input_scale is {one.dtype} {found}, and one positive float32 belongs here")


def check_order(order: Tensor, k: int) -> None:
    """Raise KernelError unless `order` has each of k inputs once."""
    if order.shape != (k,) or order.dtype != torch.int32:
        raise KernelError(f"order is {order.dtype} {list(order.shape)}, and int32 [{k}] belongs here")
    if not torch.equal(order.sort().values, torch.arange(k, dtype=torch.int32, device=order.device)):
        raise KernelError(f"order does not have each of {k} inputs once: write the checkpoint again")
