"""The 16 values of each code of 4 bits that stands for a table: bitsandbytes' nf4 and fp4, MXFP4's e2m1, NVFP4.

A weight is CODEBOOKS[name][u] * scale; each value is exact in float32. nf4 and fp4 have the group's largest magnitude
as its scale. Source: `quant_map` of the checkpoints that bitsandbytes writes (QLoRA, arXiv 2305.14314, appendix E, for
nf4). e2m1 has powers of two, of groups of 32 values. Source: OCP Microscaling Formats (MX) Specification, v1.0.

nvfp4 has the values of e2m1 in groups of 16, with scales in e4m3, and a float32 for the whole weight. The latter is
stored as a factor of each row, in the place of the offsets of other weights: weight = CODEBOOKS[name][u] * (scale *
factor). Source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip
NVFP4, NVFP4_GROUP = "nvfp4", 16  # values along K that share a scale
CODEBOOKS[NVFP4] = CODEBOOKS["e2m1"]
E4M3 = torch.float8_e4m3fn
FP8_CODES = "e4m3"  # what codes of 8 bits are called that are floats by themselves
MXFP4_GROUP = 32  # values along K that share a scale of e2m1
E8M0 = torch.float8_e8m0fnu  #: of a byte e: 2^(e - 127), and 255 is NaN


def scale_dtype(codes: str) -> torch.dtype:
    """The dtype of a codebook's scales."""
    return {"e2m1": E8M0, NVFP4: E4M3}.get(codes, torch.float32)


@cache
def table(codes: str) -> Tensor:
    """float32 [16] on the CPU. It lives as long as the program: structures of C point to it."""
    return torch.tensor(CODEBOOKS[codes], dtype=torch.float32, device="cpu")
