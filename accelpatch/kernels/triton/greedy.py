"""Argmax of a row by several programs, the last of which writes the result; see ../ops/sampling/greedy.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton import launch
from accelpatch.kernels.triton.launch import cdiv

BLOCK = 1024  # scores per program
WARPS = 4
LEAST: tl.constexpr = tl.constexpr(-(2**31))
LAST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def _best(scores, ids, vocabulary):  # type: ignore[no-untyped-def]
    """The highest of some scores and the lowest id that has it, encoded in one number that orders like the pair."""
    inside = ids < vocabulary
    score = tl.load(scores + ids, mask=inside, other=0.0)
    # float bits mapped to integers of the same order; those past the end come last
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    key = tl.where(score != score, LAST, bits ^ ((bits >> 31) & LAST))
    return tl.max((tl.where(inside, key, LEAST).to(tl.int64) << 32) | (LAST - ids), axis=0)


@triton.jit
def _token(  # type: ignore[no-untyped-def]
    scores, unfinished, ends, pad, tokens, report, best, arrived, vocabulary,
    ENDS: tl.constexpr, ONE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, row, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    scores, best = scores + row.to(tl.int64) * vocabulary, best + row * parts
    going, padding = tl.load(unfinished + row) != 0, tl.load(pad)  # asked for while the scores are on their way
    tl.store(best + part, _best(scores, part * BLOCK + tl.arange(0, BLOCK), vocabulary))
    tl.debug_barrier()  # the store, then one thread's count of it
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.debug_barrier()
        tl.store(arrived + row, 0)  # for the next launch
        every = tl.minimum(tl.arange(0, PARTS), parts - 1)
        token = LAST - (tl.max(tl.load(best + every, cache_modifier=".cg"), axis=0) & LAST)
        if ENDS:
            token = tl.where(going, token, padding)
            going = going & (tl.load(ends + token, mask=going, other=0) == 0)  # a pad may be no token
            tl.store(unfinished + row, going)
        tl.store(tokens + row, token)
        tl.store(report + row, token)
        if ONE:
            tl.store(report + 1, going.to(tl.int64))


def greedy_(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor,
    arrived: Tensor,
) -> None:  # fmt: skip
    """As the operation."""
    rows, vocabulary = scores.shape
    parts = cdiv(vocabulary, BLOCK)
    best = tokens.new_empty((rows, parts), dtype=torch.int64)
    with launch.on(scores):
        _token[(parts, rows)](
            scores.contiguous(), unfinished, unfinished if ends is None else ends, pad, tokens, report, best, arrived,
            vocabulary, ends is not None, rows == 1, triton.next_power_of_2(parts), BLOCK, num_warps=WARPS,
        )  # fmt: skip
    if rows > 1:
        report[-1:].copy_(unfinished.any().reshape(1))
