"""Weights in GGUF's blocks as they are stored, with scales of two levels; kernels/layouts/gguf_blocks.py has them."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.gguf_blocks import FORMS as FORMS
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks as GgufBlocks
from accelpatch.kernels.layouts.gguf_blocks import row_bytes
from accelpatch.kernels.layouts.row_major import Int4Rows, Int8Rows
from accelpatch.kernels.ops.linear.gguf_values import half_at, nibbles, split_blocks
from accelpatch.quant import int4

ROWS = 1 << 22  # values whose scales are checked at once


def canonical(q: Tensor, form: str) -> Int8Rows | Int4Rows:
    """Blocks of one level (Q8_0, Q4_0, Q4_1) as an int8 or 4-bit weight in groups of 32 with the same float16 scales.

    Codes under a scale of zero, whose values are 0 whatever they are, become those of zero. Raises KernelError for
    other forms.
    """
    if form not in ("Q8_0", "Q4_0", "Q4_1"):
        raise KernelError(f"{form} has scales of two levels, which no other format holds")
    each = split_blocks(q, form)
    scale = half_at(each, 0)
    offset = half_at(each, 2).flatten(1) if form == "Q4_1" else None
    codes = each[:, :, 2:].view(torch.int8) if form == "Q8_0" else nibbles(each[:, :, 4 if form == "Q4_1" else 2 :])
    if offset is None:
        codes = codes.masked_fill(scale == 0, 0 if form == "Q8_0" else 8)
    scales = scale.flatten(1)
    if form == "Q8_0":
        return Int8Rows(codes.flatten(1).contiguous(), scales)
    return Int4Rows(int4.pack(codes), scales, offset)


def check_blocks(q: Tensor, form: str, n: int | None, k: int | None) -> None:
    """Raise KernelError unless q holds [n, k] in such blocks, with scales that are finite."""
    due = [n, row_bytes(form, k or 0)]
    if q.dtype != torch.uint8 or list(q.shape) != due:
        raise KernelError(f"q is {q.dtype} {list(q.shape)}, and uint8 {due} belongs here ({form})")
    if place := not_finite(q, form):
        raise KernelError(f"q: the scale of block {place} is NaN or infinite: write the checkpoint again")


def not_finite(q: Tensor, form: str) -> list[int] | None:
    """[row, block] of the first block with a scale or minimum that is NaN or infinite; None where there is none."""
    step = max(1, ROWS // max(1, q.shape[1]))
    for start in range(0, len(q), step):
        blocks = split_blocks(q[start : start + step], form)
        for byte in FORMS[form].floats:
            bad = ~torch.isfinite(half_at(blocks, byte))
            if bool(bad.any()):
                row, block, _ = (int(i) for i in bad.nonzero()[0])
                return [start + row, block]
    return None
