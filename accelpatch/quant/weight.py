"""What the weight formats share: the triple that holds a quantised weight, and the checks before one is made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accelpatch.errors import KernelError

BLOCK = 1 << 18  # elements


class QuantizedWeight(NamedTuple):
    """q[N, K] int8 (or [N, K / 2], 4-bit pairs stored as int8), scale[N, G] float, offset[N, G] or None."""

    q: Tensor
    scale: Tensor
    offset: Tensor | None


def check_finite(weight: Tensor, name: str) -> None:
    """Raise KernelError, naming the first bad element, where `weight` holds a NaN or an infinity."""
    if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():  # NaN spreads; no copy of the weight is made
        bad = ~torch.isfinite(weight)
        place, count = [int(i) for i in bad.nonzero()[0]], int(bad.sum())
        raise KernelError(
            f"{name}{place} is {weight[tuple(place)].item()}, and {count} of {weight.numel()} values are not finite: "
            "a quantised weight cannot hold it; mend the checkpoint, or keep this site in the recipe (replace: keep)"
        )


def grouped(weight: Tensor, group_size: int | None, format_name: str) -> Tensor:
    """weight[N, K] as float32 groups [N, G, group_size]; None is one group a row. KernelError for what cannot be."""
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
    """The same groups, as many rows at a time as a CPU's cache holds: what is computed from them stays there."""
    return groups.split(max(1, BLOCK // (groups.shape[1] * groups.shape[2]))) if groups.is_cpu else (groups,)
