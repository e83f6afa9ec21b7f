"""The captured programs by which a model drafts for another one's batch.

`begin` reads where the target stands, computes the logits after the target's last token and drafts the first token;
`go_on` drafts one more. Neither waits for the host. Where the last round's draft tokens were all accepted, the draft
model has not cached the last of them; where some were rejected, it has. So `begin` always computes the token before the
last one as well: a step of two tokens takes as long as one of one, and writes the keys and values again that it finds.
Not so the first layers of the target itself, which share its cache: the check caches all tokens there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.ops.step.step_end import end_step_
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.drafts import TOKENS
from accelpatch.runtime.graphs.model_drafts import ModelDrafts
from accelpatch.runtime.graphs.sampler import Sampler
from accelpatch.runtime.graphs.step import Batch

FIRST = 2  # a slot at which programs may be captured over an empty cache


class DraftStep(Protocol):
    """A decode step over a static cache, as CapturedStep: of a draft model, or of the first layers of the target."""

    batch: Batch
    mask: Tensor
    cache: Any
    fused: FusedModel | None

    shared: bool  # whether the cache is the target's
    drafting: dict[Any, Any]  # the DraftPrograms over this step

    def advance(self) -> None:
        """Cache the batch's token, compute logits, and advance slot and positions by one."""


class ExitStep:
    """The step of a model's first layers, with its last norm and head: over the cache and mask of the whole one's step.

    The keys and values that it writes behind the cached tokens are those that the check writes there again.
    """

    shared = True

    def __init__(self, whole: Any, fused: FusedModel):
        self.batch = Batch(1, whole.batch.logits.shape[1], whole.batch.device)
        self.mask, self.cache, self.fused = whole.mask, whole.cache, fused
        self.drafting: dict[Any, Any] = {}

    def advance(self) -> None:
        """As in DraftStep."""
        batch = self.batch
        with weight_prefetch():
            logits = self.fused(batch.tokens, batch.positions, batch.slot, self.mask, self.cache)
        end_step_(logits, batch.logits, batch.slot, batch.positions, self.mask)


class DraftPrograms:
    """The programs of one draft step for one target, one sampler.

    begin, go_on: as above. feed: caches the TOKENS tokens `fed` from the draft batch's slot on; None where the step
    takes one token at a time.
    """

    def __init__(
        self, step: DraftStep, drafts: ModelDrafts, sampler: Sampler, confident: bool, graph: GraphOf, empty: bool
    ):  # fmt: skip
        """empty: whether nothing is cached yet; else both caches must have room behind the target's slot."""
        self._step, self._drafts, self._sampler, self._confident = step, drafts, sampler, confident
        self._places = torch.arange(TOKENS, dtype=torch.int64, device=step.batch.device)
        self.fed = torch.zeros_like(self._places)
        if sampler.draws:
            drafts.make_chances()
        own = (step.batch.tokens, step.batch.slot, step.batch.positions)
        state = (*drafts.state, *own)
        kept = [tensor.clone() for tensor in state]

        def captured(program: Any) -> Graph:
            for tensor in (drafts.batch.slot, drafts.batch.positions) if empty else ():
                tensor.fill_(FIRST)
            step.batch.slot.copy_(drafts.batch.slot)
            step.batch.positions.copy_(drafts.batch.positions)
            drafts.place.zero_()
            try:
                return graph(program)
            finally:
                for tensor, before in zip(state, kept, strict=True):
                    tensor.copy_(before)

        self.begin = captured(self._begin)
        self.go_on = captured(self._go_on)
        self.feed = None if step.fused is None or step.shared else captured(self._feed)

    def _begin(self) -> None:
        batch, target, step = self._step.batch, self._drafts.batch, self._step
        self._drafts.place.zero_()
        behind = 0 if step.shared else 1
        batch.slot.copy_(target.slot - behind)
        batch.positions.copy_(target.positions - behind)
        if step.fused is None or step.shared:
            for token in (target.tokens,) if step.shared else (self._drafts.before, target.tokens):
                batch.tokens.copy_(token)
                step.advance()
        else:
            logits = self._of(torch.cat([self._drafts.before, target.tokens]))
            batch.logits.copy_(logits[-1:])
            batch.slot.add_(2)
            batch.positions.add_(2)
        self._take()

    def _go_on(self) -> None:
        self._step.advance()
        self._take()

    def _take(self) -> None:
        batch = self._step.batch
        batch.tokens.copy_(self._drafts.take(batch.logits, self._sampler, self._confident))

    def _feed(self) -> None:
        self._of(self.fed)

    def _of(self, tokens: Tensor) -> Tensor:
        """Logits [T, V] after each of tokens[T] from the draft batch's slot on, which it leaves as it is."""
        step, batch, places = self._step, self._step.batch, self._places[: len(tokens)]
        assert step.fused is not None
        step.mask.index_fill_(1, batch.slot + places, 1)
        with weight_prefetch():
            return step.fused(tokens[None], batch.positions + places, batch.slot, step.mask, step.cache)
