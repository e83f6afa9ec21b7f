"""One program per block of scores; the first one does all else; see ../ops/step/step_end.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton import launch
from accelpatch.kernels.triton.launch import cdiv

BLOCK = 1024  # scores per program
WARPS = 4


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    logits, scores, slot, positions, mask, vocabulary, stride, rows, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, ids = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    score = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + row * vocabulary + ids, score, mask=inside)
    if tl.program_id(0) + tl.program_id(1) == 0:
        every = tl.arange(0, ROWS)
        here = every < rows
        cached = tl.load(slot + every, mask=here, other=0)
        there = here & (cached >= 0) & (cached < capacity)  # else nothing there is written
        tl.store(mask + every.to(tl.int64) * capacity + cached, 1, mask=there)
        tl.store(positions + every, tl.load(positions + every, mask=here, other=0) + 1, mask=here)
        tl.store(slot + every, cached + 1, mask=here)


def end_step_(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """As the operation."""
    rows, vocabulary = scores.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    with launch.on(scores):
        _leave[(cdiv(vocabulary, BLOCK), rows)](
            logits, scores, slot, positions, mask, vocabulary, logits.stride(0), rows, mask.shape[1],
            triton.next_power_of_2(rows), BLOCK, num_warps=WARPS,
        )  # fmt: skip
