"""Decoding with drafts by prompt lookup: the tokens of the plain loops in fewer steps, one row at a time.

A captured step of TOKENS rows computes the logits after the last token and after each draft. A row counts where the
token before it was chosen as drafted. Greedy choices of all rows are made at once on the device; draws, and choices by
the host, one after the other and only for rows that count: random numbers and processors see what they see without
drafts. Where nothing is drafted a step is a plain one, queued ahead as in the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from accelpatch.runtime.captured_batch import TOKENS, Drafts
from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.captured_reports import Reports
from accelpatch.runtime.captured_step import CapturedStep
from accelpatch.runtime.prompt_lookup import PromptLookup

STEPS = f"prompt lookup, steps of {TOKENS} tokens"
ACCEPTED = "prompt lookup, draft tokens accepted"
NONE = "no prompt lookup: "  # and the reason


class DecodingRun(Protocol):
    """What the drafts of a call run over; see captured_decoding.py. slot: tokens cached, wherever the answer ends."""

    step: CapturedStep
    slot: int
    kwargs: dict[str, Any]

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits after the prompt."""

    def advance(self) -> None:
        """Queue a step of one token."""

    def used(self, tokens: int) -> None:
        """How many tokens after the prompt belong in the cache."""


class Lookup:
    """One call's drafts. steps: how many were of TOKENS tokens; right: tokens that took no step of their own.

    end: the most tokens of a sequence, or None.
    """

    def __init__(self, run: DecodingRun, drafts: Drafts, ids: Tensor, end: int | None):
        self.run, self.drafts = run, drafts
        self.steps = self.accepted = 0
        self._ids: list[int] = ids[0].tolist()  # before the prompt runs: nothing is under way yet
        self._end = end
        self._known = PromptLookup([])
        self._due: list[int] = []  # drafts of the last step whose rows may still count

    @property
    def kwargs(self) -> dict[str, Any]:
        """Of the run."""
        return self.run.kwargs

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [1, V] float32 after the prompt, which is read for drafts while the device works."""
        logits = self.run.prompt(ids, config, kwargs)
        self._known = PromptLookup(self._ids)
        return logits

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [1, V] float32 after `tokens`[1], the last ones of `ids`: of a row that is there, or of a step."""
        token = int(tokens[0])
        self.learn(token)
        if self._due and self._due[0] == token:
            self.sample(TOKENS - len(self._due))
            del self._due[0]
        else:
            if self._due:
                self.judge(TOKENS - len(self._due) - 1)
            self.run.step.batch.tokens.copy_(tokens)
            self._due = self.draft() or []
            if self._due:
                self.verify(self._due)
                self.sample(0)
            else:
                self.run.advance()
        self.run.used(len(self._known) - len(self._ids))
        return self.run.step.batch.logits.clone()

    def learn(self, token: int) -> None:
        """One token more was chosen."""
        self._known.append(token)

    def judge(self, accepted: int) -> None:
        """How many drafts of a step were right."""
        self._known.learn(accepted)

    def draft(self) -> list[int] | None:
        """The drafts after the last token; None where there are none, or no room for them."""
        run = self.run
        fits = run.step.verification is not None and run.slot + TOKENS <= run.step.capacity
        wanted = self._end is None or len(self._known) + 1 < self._end
        return self._known.draft() if fits and wanted else None

    def verify(self, drafted: list[int]) -> None:
        """Queue the step of the last token and its drafts; the batch stays where it is."""
        step = self.run.step
        assert step.verification is not None
        self.drafts.send(drafted)
        step.verification.replay()
        self.steps += 1

    def sample(self, row: int) -> None:
        """Leave in the batch what the step of one token would have left that is a row of the last one."""
        self.drafts.sample(row)
        self.sampled(row)

    def sampled(self, row: int) -> None:
        """A row's token is cached, and counts."""
        self.run.slot += 1
        self.accepted += row > 0


class Late:
    """The loop whose tokens are chosen on the device, by `graph`; of a whole step by `together` where there is one."""

    def __init__(self, lookup: Lookup, graph: Graph, all_rows: Graph | None, streamer: Any, most: int):
        self._lookup, self._graph, self._all_rows = lookup, graph, all_rows
        self._streamer, self._most = streamer, most
        self._single = Reports(lookup.run.step.batch.report)
        self._several = Reports(lookup.drafts.outcome)
        self._made: list[Tensor] = []

    def run(self) -> Tensor:
        """The new tokens [1, N] on the host, after the prompt's logits in the batch."""
        self._choose()
        while True:
            # where the token under way is drafted, the step after it verifies drafts and waits for it
            ahead = len(self._made) + 1 < self._most and self._lookup.draft() is None
            if ahead:
                self._lookup.run.advance()
            report = self._single.wait()
            goes_on = bool(report[1])
            if ahead and goes_on:
                self._choose()
            if not self._put(report[:1], goes_on):
                break
            if not ahead:
                if not self._drafted():
                    break
                self._lookup.run.advance()
                self._choose()
        if self._streamer is not None:
            self._streamer.end()
        return torch.stack(self._made, dim=1)

    def _choose(self) -> None:
        self._graph.replay()
        self._single.send()

    def _put(self, token: Tensor, goes_on: bool) -> bool:
        """Hand out one token [1]; whether another one is wanted."""
        self._made.append(token)
        self._lookup.learn(int(token))
        self._lookup.run.used(len(self._made) - 1)  # should the streamer break off
        if self._streamer is not None:
            self._streamer.put(token)
        return goes_on and len(self._made) < self._most

    def _drafted(self) -> bool:
        """Steps of several tokens as long as there are drafts; whether another token is wanted."""
        while (drafted := self._lookup.draft()) is not None:
            self._lookup.verify(drafted)
            rows = self._rows(drafted) if self._all_rows is None else self._all(self._all_rows)
            if not all(self._put(token, goes_on) for token, goes_on in rows):
                return False
        return True

    def _all(self, all_rows: Graph) -> Iterator[tuple[Tensor, bool]]:
        """The tokens of a step that were chosen at once."""
        all_rows.replay()
        self._several.send()
        outcome = self._several.wait()
        count = int(outcome[TOKENS])
        self._lookup.judge(count - 1)
        for row in range(count):
            self._lookup.sampled(row)
            yield outcome[row : row + 1], row + 1 < count or bool(outcome[TOKENS + 1])

    def _rows(self, drafted: list[int]) -> Iterator[tuple[Tensor, bool]]:
        """The tokens of a step chosen one after the other, as long as the drafts are right."""
        for row in range(TOKENS):
            self._lookup.sample(row)
            self._choose()
            report = self._single.wait()
            wrong = row == len(drafted) or drafted[row] != int(report[0])
            if wrong:
                self._lookup.judge(row)
            yield report[:1], bool(report[1])
            if wrong:
                return
