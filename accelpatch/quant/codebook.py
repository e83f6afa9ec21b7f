"""4-bit weights with a codebook (nf4, fp4) in groups along K: w = BOOK[u] * scale, scale the group's largest magnitude.

scale is float32; codes u lie two a byte as in int4.py. Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.quant import int4
from accelpatch.quant.weight import grouped, row_blocks


def quantize(weight: Tensor, *, group_size: int, codebook: str) -> Int4Rows:
    """Quantise a float weight [N, K] to packed q[N, K / 2] and float32 scale[N, G]: the nearest value of each.

    Raises KernelError for NaN or infinity, an odd K, and where group_size does not divide K.
    """
    groups = grouped(weight, group_size, codebook)
    if weight.shape[1] % 2:
        raise KernelError(f"{codebook} packs two weights a byte and K = {weight.shape[1]} is odd: use int8 for it")
    scale = groups.abs().amax(2)
    values, order = torch.tensor(CODEBOOKS[codebook], dtype=torch.float32, device=weight.device).sort(stable=True)
    between = (values[1:] + values[:-1]) / 2

    def codes(rows: Tensor) -> Tensor:
        most = rows.abs().amax(2, keepdim=True)
        return order[torch.bucketize(rows / torch.where(most > 0, most, 1.0), between)]

    return Int4Rows(torch.cat([int4.pack(codes(rows)) for rows in row_blocks(groups)]), scale, codes=codebook)
