"""The highest score's token of each row, and what a decode step leaves with it: one launch on a GPU for one row.

    tokens[b] = the lowest id of the highest of scores[b]; pad[0] where a row was finished
    unfinished[b] becomes false at a token that ends rows; report = tokens, then whether any row goes on

NaN counts as higher than all else, the first one of a row, as torch's argmax has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.triton import launch


def reference_(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor
) -> None:
    """By torch."""
    leave_(scores.argmax(dim=-1), unfinished, ends, pad, tokens, report)


def leave_(
    chosen: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor
) -> None:
    """What a step leaves once it has a token[B] for each row, however it was chosen."""
    if ends is not None:
        chosen = torch.where(unfinished, chosen, pad)
        unfinished.logical_and_(~ends[chosen])
    tokens.copy_(chosen)
    report[:-1].copy_(chosen)
    report[-1:].copy_(unfinished.any().reshape(1))


def greedy_(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor,
    arrived: Tensor,
) -> None:  # fmt: skip
    """scores[B, V] float32; unfinished[B] bool; ends[V + 1] bool (None: nothing ends a row); pad[1], tokens[B] and
    report[B + 1] int64. tokens, report and unfinished are written. arrived[B] int32: zeros, which a launch counts in
    and leaves as they were; calls that may run at the same time must not share them.
    """
    by_triton = scores.device.type != "cpu" and scores.dtype == torch.float32
    if not by_triton or launch.why_not(probe(scores.device), scores.dtype):
        reference_(scores, unfinished, ends, pad, tokens, report)
        return
    from accelpatch.kernels.triton import greedy as kernel

    kernel.greedy_(scores, unfinished, ends, pad, tokens, report, arrived)
