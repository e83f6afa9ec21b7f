"""4-bit weights with a codebook (nf4, fp4, e2m1) in groups along K: w = BOOK[u] * scale; codes lie as in int4.py.

nf4 and fp4: scale is float32, the group's largest magnitude. Source: Dettmers et al. 2023, arXiv:2305.14314.
e2m1 (MXFP4): scale is E8M0, a power of two. Source: OCP Microscaling Formats (MX) Specification, v1.0, section 6.3.
nvfp4: scale is e4m3, and a float32 such that the largest scale is 448. Source: NVIDIA, arXiv:2509.25149, appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, E8M0, MXFP4_GROUP, NVFP4, NVFP4_GROUP
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.quant import int4
from accelpatch.quant.weight import grouped, row_blocks

LARGEST, E4M3_LARGEST = 6.0, 448.0  # of e2m1 and of e4m3


def quantize(weight: Tensor, *, group_size: int, codebook: str) -> Int4Rows:
    """Quantise a float weight [N, K] to packed q[N, K / 2] and scale[N, G]: the nearest value of each.

    Raises KernelError for NaN or infinity, an odd K, and where group_size does not divide K.
    """
    groups = grouped(weight, group_size, codebook)
    if weight.shape[1] % 2:
        raise KernelError(f"{codebook} packs two weights a byte and K = {weight.shape[1]} is odd: use int8 for it")
    scale = groups.abs().amax(2)
    if codebook == "e2m1":
        if group_size != MXFP4_GROUP:
            raise KernelError(f"MXFP4 has groups of {MXFP4_GROUP}, not {group_size}: leave group_size out")
        return _mxfp4(groups, scale)
    if codebook == NVFP4:
        if group_size != NVFP4_GROUP:
            raise KernelError(f"NVFP4 has groups of {NVFP4_GROUP}, not {group_size}: leave group_size out")
        return _nvfp4(groups, scale)
    values, order = torch.tensor(CODEBOOKS[codebook], dtype=torch.float32, device=weight.device).sort(stable=True)
    between = (values[1:] + values[:-1]) / 2

    def codes(rows: Tensor) -> Tensor:
        most = rows.abs().amax(2, keepdim=True)
        return order[torch.bucketize(rows / torch.where(most > 0, most, 1.0), between)]

    return Int4Rows(torch.cat([int4.pack(codes(rows)) for rows in row_blocks(groups)]), scale, codes=codebook)


def _mxfp4(groups: Tensor, most: Tensor) -> Int4Rows:
    """The exponent is that of the largest magnitude less that of 4; ties go to the even code, beyond 6 to 6."""
    exponent = (torch.frexp(most).exponent - 3).clamp(-127, 127).where(most > 0, 0)  # frexp's mantissas lie below 1
    scaled = torch.ldexp(groups, -exponent[..., None])
    scale = torch.ldexp(torch.ones_like(most), exponent).to(E8M0)
    return Int4Rows(_of_e2m1(scaled), scale, codes="e2m1")


def _nvfp4(groups: Tensor, most: Tensor) -> Int4Rows:
    """One factor for all rows, with which the largest scale is e4m3's 448 (and 1 of a weight of zeros)."""
    factor = most.amax() / (LARGEST * E4M3_LARGEST)
    factor = torch.where(factor > 0, factor, 1.0)
    scale = (most / LARGEST / factor).clamp(max=E4M3_LARGEST).to(E4M3)
    wide = (scale.float() * factor)[..., None]
    scaled = groups / torch.where(wide > 0, wide, torch.inf)
    return Int4Rows(_of_e2m1(scaled), scale, factor.double().expand(len(most), 1).contiguous(), NVFP4)


def _of_e2m1(scaled: Tensor) -> Tensor:
    """Packed codes of the nearest values of e2m1; ties go to the even code, beyond 6 to 6."""
    values = torch.tensor(CODEBOOKS["e2m1"][:8], device=scaled.device)
    between = (values[1:] + values[:-1]) / 2

    def codes(rows: Tensor) -> Tensor:
        low, high = (torch.bucketize(rows.abs(), between, right=right) for right in (False, True))
        return torch.where(low % 2 == 0, low, high) + 8 * rows.signbit()

    return torch.cat([int4.pack(codes(rows)) for rows in row_blocks(scaled)])
