"""3-bit weights in groups along K, u in 0..7, eight in three bytes (kernels/ops/linear/int3_linear.py).

    asymmetric   w = u * scale + offset     offset a float: the group's minimum
    symmetric    w = (u - 4) * scale        scale = -(the value of largest magnitude) / 4, so it can be negative
    zero point   w = (u - z) * scale        z an integer of 0..7, as int8; 0 is exact (GPTQ; theirs may be 8)

All else is as in int4.py: the scales' dtypes, and that they are rounded before codes are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int3Rows
from accelpatch.kernels.ops.linear.int3_linear import CODES, pack
from accelpatch.quant.int4 import Int4Grid
from accelpatch.quant.weight import grouped


@dataclass(frozen=True)
class Int3Grid(Int4Grid):
    """The values that a group can take, of 8."""

    most: ClassVar[int] = 7

    def weight(self, u: Tensor, scale: Tensor, offset: Tensor | None) -> Int3Rows:  # type: ignore[override]
        """The weight of codes u[N, G, g]."""
        return Int3Rows(pack(u), scale, offset)


def quantize(weight: Tensor, *, group_size: int, symmetric: bool = False, zero_point: bool = False) -> Int3Rows:
    """Quantise a float weight [N, K] to packed q[N, 3 K / 8], scale[N, G] and offset[N, G] (None where symmetric).

    zero_point: the offset is an integer, not a minimum. Raises KernelError for NaN or infinity, a K that is no multiple
    of 8, and where group_size does not divide K.
    """
    groups = grouped(weight, group_size, "int3")
    if weight.shape[1] % CODES:
        raise KernelError(f"int3 packs eight weights in three bytes, and K = {weight.shape[1]}: use int4 or int8 here")
    grid = Int3Grid("none" if symmetric else "zero_point" if zero_point else "minimum")
    scale, offset = grid.fit(groups, grid.storage(groups))
    return grid.weight(grid.codes(groups, scale, offset), scale, offset)
