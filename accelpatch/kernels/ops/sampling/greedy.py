"""Greedy sampling: the argmax of each row, and the state that a decode step leaves; one launch on a GPU for one row.

    tokens[b] = lowest id with the highest of scores[b]; pad[0] where the row was finished
    unfinished[b] becomes false at a token that ends rows; report = tokens, then whether any row goes on

NaN counts as the highest score; the first one of a row wins, as in torch's argmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch


def reference_(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor
) -> None:
    """In plain torch."""
    leave_(scores.argmax(dim=-1), unfinished, ends, pad, tokens, report)


def leave_(
    chosen: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor
) -> None:
    """Write the state that a step leaves, given the chosen token[B] of each row."""
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
    report[B + 1] int64. Writes tokens, report and unfinished. arrived[B] int32: counters, zero before and after a
    launch; calls that may run at the same time must not share them.
    """
    args = (scores, unfinished, ends, pad, tokens, report, arrived)
    dispatch.run("greedy", spec, scores.device, args)


def spec(scores: Tensor, *state: Tensor | None) -> Spec:
    """The Spec of a call, for dispatch."""
    rows, vocabulary = scores.shape
    return Spec("greedy", {"B": rows, "V": vocabulary}, scores.dtype)


def by_torch(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor,
    arrived: Tensor,
) -> None:  # fmt: skip
    """The implementation `torch`: the plain form, which needs no counters."""
    reference_(scores, unfinished, ends, pad, tokens, report)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    return launch.why_not(device) or (None if spec.dtype == torch.float32 else f"scores are float32, not {spec.dtype}")


def by_triton(
    scores: Tensor, unfinished: Tensor, ends: Tensor | None, pad: Tensor, tokens: Tensor, report: Tensor,
    arrived: Tensor,
) -> None:  # fmt: skip
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton import greedy as kernel

    kernel.greedy_(scores, unfinished, ends, pad, tokens, report, arrived)


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {"greedy": Kernel(greedy_, by_torch, spec, IMPLEMENTATIONS)}
