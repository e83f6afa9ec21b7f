"""FP8 weights in blocks of 128 x 128 as DeepSeek-V3, Qwen3 and transformers store them, in the canonical form.

    weight e4m3fn [N, K], weight_scale_inv [ceil(N / 128), ceil(K / 128)], by which codes are multiplied, its name
    notwithstanding: float32, or powers of two (E8M0)

The last blocks may be smaller. Codes stay as they are; each row gets the scales of its blocks. What cannot be so is
refused with a KernelError that begins with the tensor's name. Sources: DeepSeek-V3 technical report, arXiv 2412.19437;
transformers 5.24, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E8M0
from accelpatch.kernels.layouts.row_major import FP8_BLOCK, Fp8Rows
from accelpatch.quant import fp8
from accelpatch.quant.fp8 import NAN

Tensors = Mapping[str, Tensor | None]
SCALES = (torch.float32, torch.bfloat16, E8M0)
SIZE = FP8_BLOCK  # of a block's rows and columns


def blocks(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Fp8Rows:
    """A linear layer[n, k]. config: not read."""
    codes, scales = tensors.get("weight"), tensors.get("weight_scale_inv")
    for name, one in (("weight", codes), ("weight_scale_inv", scales)):
        if one is None:
            raise KernelError(f"{name} is missing")
    assert codes is not None
    assert scales is not None
    if codes.dtype != torch.float8_e4m3fn or list(codes.shape) != [n, k]:
        raise KernelError(f"weight is {codes.dtype} {list(codes.shape)}, and float8_e4m3fn {[n, k]} belongs here")
    due = [-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)]
    if scales.dtype not in SCALES or list(scales.shape) != due:
        found = f"{scales.dtype} {list(scales.shape)}"
        raise KernelError(f"weight_scale_inv is {found}, and float32 {due} belongs here, one for each 128 x 128")
    wide = scales.to(torch.float32)
    if not bool((fit := (wide > 0) & wide.isfinite()).all()):
        place = [int(i) for i in (~fit).nonzero()[0]]
        bad = float(wide[tuple(place)])
        raise KernelError(f"weight_scale_inv{place} is {bad}, and a scale is above zero and finite: fetch it again")
    if bool((wrong := codes.view(torch.uint8) & NAN == NAN).any()):
        raise KernelError(f"weight{[int(i) for i in wrong.nonzero()[0]]} is NaN: fetch it again")
    return Fp8Rows(codes.contiguous(), fp8.of_blocks(wide, n))


def packed(weight: Fp8Rows) -> dict[str, Tensor]:
    """The tensors of a layer; blocks of zeros get a scale of 1, as readers refuse one of 0. Raises KernelError where
    rows of a block have scales of their own."""
    scales = weight.scale[::FP8_BLOCK].contiguous()
    if not torch.equal(fp8.of_blocks(scales, weight.n), weight.scale):
        raise KernelError("scales that differ within blocks of 128 rows")
    return {"weight": weight.w, "weight_scale_inv": torch.where(scales == 0, 1.0, scales)}
