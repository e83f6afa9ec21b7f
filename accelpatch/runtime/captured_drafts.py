"""Several tokens of one sequence in one captured step: the last one and drafts of those after it.

The model's program computes the logits after each of them, as if all drafts were right: a row has the bits that a step
of its own would give it, since products and attention compute it alike among others and alone. Where the choice needs
the scores alone (greedy), a second program chooses a token for every row, finds how many drafts were right and moves
the batch on behind them. Keys and values of wrong drafts lie behind the batch's slot, where nothing reads them before
the next steps write over them.
"""

from __future__ import annotations

import torch

from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.captured_batch import TOKENS, Drafts, GraphOf
from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.captured_step import CAPTURE_ERRORS, CapturedStep, first_line
from accelpatch.runtime.fused_layer import FusedModel


def verifying(step: CapturedStep, fused: FusedModel, graph: GraphOf) -> CapturedStep:
    """The same step of one row, with one of several tokens beside it where it can be captured."""
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


def verification(step: CapturedStep, drafts: Drafts, fused: FusedModel, graph: GraphOf) -> Graph:
    """The captured program of TOKENS tokens over the cache of `step`, which must hold nothing yet.

    It leaves the logits of all rows and does not move the batch on. Raises what a capture raises.
    """
    batch, mask, cache = step.batch, step.mask, step.cache
    kept = batch.slot.clone(), batch.positions.clone()
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
