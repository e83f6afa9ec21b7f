"""Decoding with draft tokens from prompt lookup: the same tokens as the plain loops in fewer steps, for one sequence.

Saxena 2023, "Prompt Lookup Decoding". Places are found as in Lempel-Ziv compressors, by chains of earlier places of the
last pair of tokens, so that the cost per token does not grow with the length of the text.

A captured step of TOKENS places computes the logits after the last token and after each draft token. A place is valid
if all draft tokens before it are accepted. Greedy decoding picks tokens at all places at once on the device. Sampling,
and sampling by the host, go place by place and only over valid ones, so that random numbers and logits processors see
the same as without draft tokens. Without draft tokens, a step is a plain one, queued ahead as in the plain loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from accelpatch.runtime.generation.drafter import Drafter
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.drafts import DRAFTS, TOKENS, Drafts
from accelpatch.runtime.graphs.sampler import Reports
from accelpatch.runtime.graphs.step import CapturedStep

STEPS = f"prompt lookup, steps of {TOKENS} tokens"
ACCEPTED = "prompt lookup, draft tokens accepted"
NONE = "no prompt lookup: "  # and the reason
SHORTEST = 2  # least length of a match in tokens
LONGEST = 16  # longer matches are not distinguished
CANDIDATES = 16  # most earlier places compared
NOWHERE = -1


class PromptLookup:
    """A Drafter: the tokens of one sequence so far, and what followed where the last of them stood before.

    A rejected draft costs a step of several tokens that yields one: each step without an accepted draft token doubles
    the length of the match that is asked for, each step with one halves it.
    """

    def __init__(self, tokens: Iterable[int]):
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair -> its latest place, the last token apart
        self._earlier: list[int] = []  # place -> the earlier occurrence of the pair that ends there
        self._asked = SHORTEST
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        """Append a token."""
        tokens, last = self._tokens, len(self._tokens) - 1
        if last >= 1:
            pair = (tokens[last - 1], tokens[last])
            self._earlier.append(self._latest.get(pair, NOWHERE))
            self._latest[pair] = last
        elif last == 0:
            self._earlier.append(NOWHERE)
        tokens.append(token)

    def draft(self) -> list[int] | None:
        """The next DRAFTS tokens, or None where the last tokens have not occurred before.

        Uses the latest of the longest matches; where what follows it reaches the end of the text, it is repeated.
        """
        tokens, last = self._tokens, len(self._tokens) - 1
        place = self._latest.get((tokens[last - 1], tokens[last]), NOWHERE) if last >= 1 else NOWHERE
        best, longest = NOWHERE, self._asked - 1
        for _ in range(CANDIDATES):
            if place == NOWHERE or longest == LONGEST:
                break
            length = self._match(place, last)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        if best == NOWHERE:
            return None
        found = tokens[best + 1 : best + 1 + DRAFTS]
        while len(found) < DRAFTS:
            found.append(found[best - last])  # negative: from the end
        return found

    def learn(self, accepted: int) -> None:
        """Adapt to the number of draft tokens that a step accepted."""
        self._asked = max(self._asked // 2, SHORTEST) if accepted else min(self._asked * 2, LONGEST)

    def _match(self, place: int, last: int) -> int:
        """Length of the common suffix of the tokens up to `place` and up to `last`: at least two, at most LONGEST."""
        tokens, length = self._tokens, 2
        while length < LONGEST and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        return length


class Run(Protocol):
    """What a Lookup needs of the call of generate() that it drafts for (graph_loop.py)."""

    kwargs: dict[str, Any]
    step: CapturedStep
    slot: int

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits after the prompt."""

    def advance(self) -> None:
        """Queue one step of the model."""

    def used(self, tokens: int) -> None:
        """Set how many tokens after the prompt belong into the caller's cache."""


class Lookup:
    """The draft tokens of one generate() call. steps: steps of TOKENS tokens. accepted: draft tokens that were.

    known: the text so far. end: the maximum length of the sequence in tokens, or None.
    """

    def __init__(self, run: Run, drafts: Drafts, ids: Tensor, end: int | None):
        self.run, self.drafts = run, drafts
        self.steps = self.accepted = 0
        self._ids: list[int] = ids[0].tolist()  # read before the prompt runs: the device is still idle
        self._end = end
        self.known: Drafter = PromptLookup([])
        self._due: list[int] = []  # draft tokens of the last step that may still be accepted
        self._drafted = 0  # how many they were

    @property
    def kwargs(self) -> dict[str, Any]:
        """The run's model arguments."""
        return self.run.kwargs

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [1, V] float32 after the prompt, which is indexed for look-ups while the device works."""
        logits = self.run.prompt(ids, config, kwargs)
        self.known = PromptLookup(self._ids)
        return logits

    def report(self, paths: Counter[str]) -> None:
        """Count the steps with draft tokens, and those that were accepted."""
        paths[STEPS] += self.steps
        paths[ACCEPTED] += self.accepted

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [1, V] float32 after `tokens`[1], the last of `ids`: from a verified place, or from a new step."""
        token = int(tokens[0])
        self.known.append(token)
        if self._due and self._due[0] == token:
            self.sample(self._drafted - len(self._due) + 1)
            del self._due[0]
        else:
            if self._drafted:
                self.known.learn(self._drafted - len(self._due))
            self.run.step.batch.tokens.copy_(tokens)
            self._due = self.draft() or []
            self._drafted = len(self._due)
            if self._due:
                self.verify(self._due)
                self.sample(0)
            else:
                self.plain()
        self.run.used(len(self.known) - len(self._ids))
        return self.run.step.batch.logits.clone()

    def plain(self) -> None:
        """Queue a step over the last token alone."""
        self.run.advance()

    def draft(self) -> list[int] | None:
        """The draft tokens after the last token; None where there are none, or the cache has no room for them."""
        run = self.run
        fits = run.step.verification is not None and run.slot + TOKENS <= run.step.capacity
        wanted = self._end is None or len(self.known) + 1 < self._end
        return self.known.draft() if fits and wanted else None

    def verify(self, drafted: list[int]) -> None:
        """Queue the step over the last token and its draft tokens; the batch is not advanced."""
        step = self.run.step
        assert step.verification is not None
        self.drafts.send(drafted)
        step.verification.replay()
        self.steps += 1

    def sample(self, row: int) -> None:
        """Put the batch into the state after the one-token step that equals place `row` of the last step."""
        self.drafts.sample(row)
        self.sampled(row)

    def sampled(self, row: int) -> None:
        """Count the token of place `row` as cached."""
        self.run.slot += 1
        self.accepted += row > 0


class Late:
    """The loop that samples on the device: one place by `graph`, all places of a step by `together` if given."""

    def __init__(self, lookup: Lookup, graph: Graph, all_rows: Graph | None, streamer: Any, most: int):
        self._lookup, self._graph, self._all_rows = lookup, graph, all_rows
        self._streamer, self._most = streamer, most
        self._single = Reports(lookup.run.step.batch.report)
        self._several = Reports(lookup.drafts.outcome)
        self._made: list[Tensor] = []

    def run(self) -> Tensor:
        """New tokens [1, N] on the host; the prompt's logits must be in the batch."""
        self._choose()
        while True:
            # with draft tokens, the next step must wait for this token
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
        """Emit one token [1]; returns whether another one is wanted."""
        self._made.append(token)
        self._lookup.known.append(int(token))
        self._lookup.run.used(len(self._made) - 1)  # in case the streamer raises
        if self._streamer is not None:
            self._streamer.put(token)
        return goes_on and len(self._made) < self._most

    def _drafted(self) -> bool:
        """Run steps of several tokens while there are draft tokens; returns whether another token is wanted."""
        while (drafted := self._lookup.draft()) is not None:
            self._lookup.verify(drafted)
            rows = self._rows(drafted) if self._all_rows is None else self._all(self._all_rows)
            if not all(self._put(token, goes_on) for token, goes_on in rows):
                return False
        return True

    def _all(self, all_rows: Graph) -> Iterator[tuple[Tensor, bool]]:
        """The accepted tokens of a step, sampled at all places at once."""
        all_rows.replay()
        self._several.send()
        outcome = self._several.wait()
        count = int(outcome[TOKENS])
        self._lookup.known.learn(count - 1)
        for row in range(count):
            self._lookup.sampled(row)
            yield outcome[row : row + 1], row + 1 < count or bool(outcome[TOKENS + 1])

    def _rows(self, drafted: list[int]) -> Iterator[tuple[Tensor, bool]]:
        """The accepted tokens of a step, sampled place by place while the draft tokens match."""
        for row in range(TOKENS):
            self._lookup.sample(row)
            self._choose()
            report = self._single.wait()
            wrong = row == len(drafted) or drafted[row] != int(report[0])
            if wrong:
                self._lookup.known.learn(row)
            yield report[:1], bool(report[1])
            if wrong:
                return
