"""One captured step over several tokens of a sequence: its last token and the draft tokens after it.

The model's program computes the logits after each of them, as if all draft tokens were accepted; each row has the same
bits as a one-token step would give, since GEMM and attention kernels compute a row independently of the others. For
greedy decoding a second program picks a token at every place, counts the accepted draft tokens and moves the batch
behind them. Keys and values of rejected tokens lie behind the batch's slot, where later steps overwrite them before
they are read.
"""

from __future__ import annotations

import torch

from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.batch import TOKENS, Drafts, GraphOf
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS, CapturedStep, first_line


def several_tokens_why_not(step: CapturedStep, fused: FusedModel | None) -> str | None:
    """Why a step of several tokens of a row is not bit for bit one step after the other; None where it is.

    fused: the model's fused layers as they are now.
    """
    if step.batch.rows != 1:
        return f"{step.batch.rows} rows"
    if fused is not None and fused.in_parts:
        return "layers on several devices, or offloaded"
    if not step.fused or (fused is not None and fused.unfused):
        return "modules in the captured step"  # their bits may depend on the number of rows
    return None


def verifying(step: CapturedStep, fused: FusedModel, graph: GraphOf) -> CapturedStep:
    """`step` of one row, with a captured step of several tokens beside it where that can be captured."""
    batch = step.batch
    if batch.drafts is None:
        batch.drafts = Drafts(batch)
    if step.capacity >= TOKENS:
        try:
            step.verification = verification(step, batch.drafts, fused, graph)
        except torch.OutOfMemoryError:
            raise
        except CAPTURE_ERRORS as error:
            step.no_drafts = f"{type(error).__name__}: {first_line(error)}"
    return step


def verification(
    step: CapturedStep, drafts: Drafts, fused: FusedModel, graph: GraphOf, empty: bool = True
) -> Graph:  # fmt: skip
    """The captured program over as many tokens as `drafts` has places, and the cache of `step`.

    It leaves the logits of all places and does not advance the batch. Raises what the capture raises. empty: whether
    the cache holds nothing; else it must have room for the tokens behind the batch's slot.
    """
    batch, mask, cache = step.batch, step.mask, step.cache
    kept = batch.slot.clone(), batch.positions.clone()
    if empty:
        batch.slot.zero_()
        batch.positions.zero_()

    def verify() -> None:
        mask.index_fill_(1, batch.slot + drafts.places, 1)
        tokens = torch.cat([batch.tokens, drafts.drafted])[None]
        with weight_prefetch():
            logits = fused(tokens, batch.positions + drafts.places, batch.slot, mask, cache)
        drafts.logits.copy_(logits)

    try:
        return graph(verify)
    finally:
        batch.slot.copy_(kept[0])
        batch.positions.copy_(kept[1])
