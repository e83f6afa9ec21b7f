"""One captured step over several tokens of a sequence: its last token and the draft tokens after it.

The model's program computes the logits after each of them, as if all draft tokens were accepted; each row has the same
bits as a one-token step would give, since GEMM and attention kernels compute a row independently of the others. For
greedy decoding a second program picks a token at every place, counts the accepted draft tokens and moves the batch
behind them. Keys and values of rejected tokens lie behind the batch's slot, where later steps overwrite them before
they are read.
"""

from __future__ import annotations

from typing import Any

import torch

from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.sampler import Sampler
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS, Batch, CapturedStep, first_line

DRAFTS = 7  # draft tokens per step; with the last token, a step of eight
TOKENS = DRAFTS + 1  # tokens of a step with draft tokens


class Drafts:
    """The state of a step of TOKENS tokens (the last token and DRAFTS draft tokens) of a one-row Batch.

    drafted[DRAFTS] int64, written by the host. logits[TOKENS, V] float32: after the last token and after each draft
    token. outcome[TOKENS + 2] int64: the token sampled at each place, how many of them are accepted, whether generation
    goes on. For the sampler this is a batch of TOKENS rows, whose report lies in the outcome.
    """

    def __init__(self, batch: Batch):
        int64: Any = {"dtype": torch.int64, "device": batch.device}
        self._last, self._slot, self._positions = batch.tokens, batch.slot, batch.positions
        self._logits = batch.logits
        self.drafted, self.tokens = torch.zeros(DRAFTS, **int64), torch.zeros(TOKENS, **int64)
        self.places = torch.arange(TOKENS, **int64)
        self.slot = torch.zeros(TOKENS, **int64)
        self.logits = batch.logits.new_zeros(TOKENS, batch.logits.shape[1])
        self.unfinished = torch.ones(TOKENS, dtype=torch.bool, device=batch.device)
        self.arrived = torch.zeros(TOKENS, dtype=torch.int32, device=batch.device)
        self.outcome = torch.zeros(TOKENS + 2, **int64)
        self.report = self.outcome[:-1]
        self.suppressed_until, self.pad = batch.suppressed_until, batch.pad
        self.ends, self.suppressed, self.tables = batch.ends, batch.suppressed, batch.tables
        self._sent = torch.zeros(DRAFTS, dtype=torch.int64, device="cpu", pin_memory=batch.device.type == "cuda")
        self._samplers: dict[Any, Graph] = {}

    def send(self, drafted: list[int]) -> None:
        """Queue the copy of DRAFTS tokens to the device; the previous step must have read its own."""
        self._sent.copy_(torch.tensor(drafted))
        self.drafted.copy_(self._sent, non_blocking=True)

    def sample(self, row: int) -> None:
        """Put the batch into the state after a one-token step whose logits are `row`'s."""
        self._logits.copy_(self.logits[row : row + 1])
        self._slot.add_(1)
        self._positions.add_(1)

    def graph_of(self, sampler: Sampler, graph: GraphOf) -> Graph:
        """The captured program of a sampler over all places. Capturing it leaves the batch's state as it was."""
        if sampler.key not in self._samplers:
            state = (self._last, self._slot, self._positions)
            kept = [tensor.clone() for tensor in state]
            self._samplers[sampler.key] = graph(lambda: self._choose(sampler))
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        return self._samplers[sampler.key]

    def _choose(self, sampler: Sampler) -> None:
        """The program: sample at every place, count the accepted tokens, and move the batch behind the last of them."""
        self.unfinished.fill_(True)
        self.slot.copy_(self._slot + self.places + 1)  # each row's, after its one-token step
        sampler.next_token(self)
        accepted = (self.drafted == self.tokens[:-1]) & self.unfinished[:-1]
        last = accepted.long().cumprod(0).sum(0, keepdim=True)
        self._last.copy_(self.tokens.index_select(0, last))
        self._slot.add_(last + 1)
        self._positions.add_(last + 1)
        self.outcome[TOKENS:].copy_(torch.cat([last + 1, self.unfinished.index_select(0, last).long()]))


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
    """`step` of one row, which also gets a captured step of several tokens where that can be captured."""
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
