"""The device's side of drafts that a model makes: what is drafted, and the programs that accept it.

A check computes the target's logits after the last token and after each draft token (drafts.py). The program here then
accepts draft tokens and moves the batch behind them, so that the next drafts can be queued before the host has read
anything. Greedy: draft tokens are accepted up to the first that is not the target's own choice. Sampled: algorithm 1 of
Leviathan et al. 2022, "Fast Inference from Transformers via Speculative Decoding": a draft token x is accepted with
probability min(1, p(x) / q(x)); the token in the place of the first rejected one is drawn from max(0, p - q). Tokens
then have the target's distribution p whatever the drafts' distribution q is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.drafts import DRAFTS, TOKENS, Drafts
from accelpatch.runtime.graphs.sampler import Sampler, drawn
from accelpatch.runtime.graphs.step import SAMPLERS, Batch

SIZES = (2, 4, 6, 8)  # tokens of a check, the last one included; fewer drafts than it has places take the next larger


class ModelDrafts:
    """The state of the draft tokens of a one-row Batch, all on its device.

    drafts: their tokens, and what a check leaves. place[1]: how many are drafted so far. due[1]: how many of them a
    check may accept. before[1]: the token before the batch's last. chances[DRAFTS, V] float32: q of each draft token,
    where they are drawn. sure[DRAFTS] int64: whether each was at least as likely as threshold[1].
    """

    def __init__(self, batch: Batch):
        int64: Any = {"dtype": torch.int64, "device": batch.device}
        self.batch, self.drafts = batch, batch.drafts or Drafts(batch)
        batch.drafts = self.drafts
        self.place, self.due, self.before = (torch.zeros(1, **int64) for _ in range(3))
        self.sure, self.threshold = torch.ones(DRAFTS, **int64), batch.logits.new_zeros(1)
        self.chances: Any = None
        self._parts = {TOKENS: self.drafts}
        self._accepting: dict[Any, Graph] = {}

    def make_chances(self) -> None:
        """Make `chances`, before a program that draws is captured."""
        if self.chances is None:
            self.chances = self.batch.logits.new_zeros(DRAFTS, self.batch.logits.shape[1])

    def first(self, tokens: int) -> Drafts:
        """The first places of `drafts`, over the same memory."""
        if tokens not in self._parts:
            part = copy.copy(self.drafts)
            part.drafted = self.drafts.drafted[: tokens - 1]
            for name in ("tokens", "places", "slot", "logits", "unfinished", "arrived"):
                setattr(part, name, getattr(self.drafts, name)[:tokens])
            part.report = self.drafts.outcome[: tokens + 1]
            self._parts[tokens] = part
        return self._parts[tokens]

    def take(self, logits: Tensor, sampler: Sampler, confident: bool) -> Tensor:
        """Within a program: the next draft token [1], from a draft model's logits[1, V] float32.

        confident: whether anybody reads `sure`.
        """
        if sampler.draws:
            chances = nn.functional.softmax(sampler.warped(logits), dim=-1)
            token = drawn(chances)
            self.chances.index_copy_(0, self.place, chances)
        else:
            chances = nn.functional.softmax(logits, dim=-1) if confident else logits
            token = logits.argmax(dim=-1)
        if confident:
            likely = chances.gather(1, token[:, None])[0] >= self.threshold
            self.sure.index_copy_(0, self.place, likely.long())
        self.drafts.drafted.index_copy_(0, self.place, token)
        self.place.add_(1)
        return token

    def accepts(self, sampler: Sampler, tokens: int) -> bool:
        """Whether the program of `accepting` is captured."""
        return (tokens, sampler.key) in self._accepting

    def accepting(self, sampler: Sampler, tokens: int, graph: GraphOf) -> Graph:
        """The captured program that follows a check of so many tokens. Capturing it leaves the state as it was."""
        key = tokens, sampler.key
        if key not in self._accepting:
            state = self.state
            kept = [tensor.clone() for tensor in state]
            while len(self._accepting) >= SAMPLERS * len(SIZES):
                del self._accepting[next(iter(self._accepting))]
            self._accepting[key] = graph(lambda: self._accept(sampler, self.first(tokens)))
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        return self._accepting[key]

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What programs change that must be as it was after a capture's runs."""
        batch = self.batch
        return batch.tokens, batch.slot, batch.positions, self.place, self.before, self.drafts.drafted

    def _accept(self, sampler: Sampler, places: Drafts) -> None:
        """The program: outcome = the tokens that come next, how many they are, and whether generation goes on."""
        batch = self.batch
        places.slot.copy_(batch.slot + places.places + 1)  # each place's, after its one-token step
        if sampler.draws:
            last, goes_on = self._drawn(sampler, places)
        else:
            places.unfinished.fill_(True)
            sampler.next_token(places)
            right = (places.drafted == places.tokens[:-1]) & places.unfinished[:-1] & (places.places[:-1] < self.due)
            last = right.long().cumprod(0).sum(0, keepdim=True)
            goes_on = places.unfinished.index_select(0, last)
        self.before.copy_(torch.cat([batch.tokens, places.drafted]).index_select(0, last))
        batch.tokens.copy_(places.tokens.index_select(0, last))
        batch.slot.add_(last + 1)
        batch.positions.add_(last + 1)
        places.outcome[TOKENS:].copy_(torch.cat([last + 1, goes_on.long()]))

    def _drawn(self, sampler: Sampler, places: Drafts) -> tuple[Tensor, Tensor]:
        """Accept or draw: (the index of the last token, whether generation goes on), each [1]."""
        p = nn.functional.softmax(sampler.scores(places), dim=-1)
        q = self.chances[: len(p) - 1]
        taken = places.drafted[:, None]
        ratio = (p[:-1].gather(1, taken) / q.gather(1, taken))[:, 0]
        right = (torch.rand_like(ratio) <= ratio) & (places.places[:-1] < self.due)
        last = right.long().cumprod(0).sum(0, keepdim=True)
        rejected = nn.functional.pad(q, (0, 0, 0, 1)).index_select(0, last) * (last < self.due)[:, None]
        wanted = p.index_select(0, last)
        rest = (wanted - rejected).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
        places.tokens[:-1].copy_(places.drafted)
        places.tokens.index_copy_(0, last, drawn(rest))
        goes_on = torch.ones_like(last, dtype=torch.bool)
        if sampler.ends is not None:  # an accepted draft token may be an end
            ended = places.ends[places.tokens] & (places.places <= last)
            behind = (~ended).long().cumprod(0).sum(0, keepdim=True)
            goes_on = behind > last
            last = torch.minimum(last, behind)
        places.report[:-1].copy_(places.tokens)
        return last, goes_on
