"""The highest score's token of a row by one program; see ../greedy.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton import launch

BLOCK = 8192  # scores at once
WARPS = 16
LEAST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def _token(  # type: ignore[no-untyped-def]
    scores,
    unfinished,
    ends,
    pad,
    tokens,
    report,
    vocabulary,
    ENDS: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    scores += row.to(tl.int64) * vocabulary
    # floats ordered as integers are; those past the end come after all
    top, at = tl.full([BLOCK], LEAST, tl.int32), tl.full([BLOCK], 0, tl.int32)
    for start in tl.range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        score = tl.load(scores + ids, mask=inside, other=0.0)
        bits = (score + 0.0).to(tl.int32, bitcast=True)  # no negative zero
        key = tl.where(score != score, 2147483647, bits ^ ((bits >> 31) & 2147483647))
        higher = inside & (key > top)
        top, at = tl.where(higher, key, top), tl.where(higher, ids, at)
    best = tl.max(top, axis=0)
    token = tl.min(tl.where(top == best, at, vocabulary), axis=0).to(tl.int64)
    going = tl.load(unfinished + row) != 0
    if ENDS:
        token = tl.where(going, token, tl.load(pad))
        going = going & (tl.load(ends + token, mask=going, other=0) == 0)  # a pad may be no token
        tl.store(unfinished + row, going)
    tl.store(tokens + row, token)
    tl.store(report + row, token)
    if ONE:
        tl.store(report + 1, going.to(tl.int64))


def greedy_(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor
) -> None:
    """As the operation."""
    rows, vocabulary = scores.shape
    with launch.on(scores):
        _token[(rows,)](
            scores.contiguous(), unfinished, unfinished if ends is None else ends, pad, tokens, report, vocabulary,
            ends is not None, rows == 1, min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS,
        )  # fmt: skip
    if rows > 1:
        report[-1:].copy_(unfinished.any().reshape(1))
