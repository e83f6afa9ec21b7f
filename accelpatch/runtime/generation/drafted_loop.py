"""generate()'s loop over captured steps and the drafts of a model, for one sequence whose tokens the device chooses.

A round drafts k tokens, checks them in one step of the target, and accepts some: all on the device. The next round's
drafts are queued before the host reads what became of the last one. Then it queues the check, or, at an end, nothing.
How many are drafted follows what they gave and took so far (drafter.Pace); with none, steps are plain ones.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from accelpatch.report import NO_DRAFTS
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.draft_model_run import DraftRun
from accelpatch.runtime.generation.drafter import Counts, Limit, Pace
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.drafts import TOKENS, verification
from accelpatch.runtime.graphs.model_drafts import SIZES, ModelDrafts
from accelpatch.runtime.graphs.sampler import Reports, Sampler
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS, first_line


class Checked:
    """A call whose drafts captured steps check. counts: what became of the drafts."""

    def __init__(self, run: CapturedRun, drafts: ModelDrafts, pace: Pace, limit: Limit):
        self.run, self.drafts, self.pace, self.limit = run, drafts, pace, limit
        self.counts = Counts(pace)
        self.fresh = False  # whether something was captured or caught up with, so that times say nothing

    def check(self, drafts: int) -> Graph | None:
        """The captured step over so many draft tokens or more; None where there is no room, or it cannot be captured.

        Plain steps fill a cache to its end, and grow it.
        """
        tokens = next(size for size in SIZES if size > drafts)
        run = self.run
        if run.slot + TOKENS > run.step.capacity:
            return None
        checks = run.step.checks
        if tokens not in checks:
            fused, self.fresh = run.step.fused, True
            assert fused is not None
            graph = run.runtime.captured.graph(run.step.batch.device)
            try:
                with torch.inference_mode(False):
                    checks[tokens] = verification(run.step, self.drafts.first(tokens), fused, graph, empty=False)
            except torch.OutOfMemoryError:
                raise
            except CAPTURE_ERRORS as error:
                self.limit.off = True
                run.runtime.paths[f"{NO_DRAFTS}{type(error).__name__}: {first_line(error)}"] += 1
                return None
        return checks[tokens]


class Drafted(Checked):
    """A call whose drafts a model's captured steps make: what the loops of the device and of the host share.

    text: the tokens so far.
    """

    def __init__(self, run: CapturedRun, drafts: ModelDrafts, drafter: DraftRun, pace: Pace, limit: Limit):
        super().__init__(run, drafts, pace, limit)
        self.drafter = drafter
        self.text: list[int] = []

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [1, V] float32 after the prompt, which the draft model caches too."""
        self.text = ids[0].tolist()  # read before the prompt runs: the device is still idle
        mask = kwargs.get(self.run.mask)
        logits = self.run.prompt(ids, config, kwargs)
        self.drafter.prompt(ids, mask)
        return logits


class DeviceLoop(Drafted):
    """The loop in which the device chooses the tokens."""

    _sampler: Sampler
    _graph: Graph
    _streamer: Any = None
    _most = 0  # new tokens at most
    _pending = 0  # draft tokens of the round that is under way
    _began: float | None = None

    def loop(self, sampler: Sampler, graph: Graph, streamer: Any, most: int) -> Tensor:
        """New tokens [1, N] on the host; the prompt's logits must be in the batch."""
        self._sampler, self._graph, self._streamer, self._most = sampler, graph, streamer, most
        self._single = Reports(self.run.step.batch.report)
        self._several = Reports(self.drafts.drafts.outcome)
        self._made: list[Tensor] = []
        self._choose()
        while True:
            queued, drafted = self._ahead()
            tokens, goes_on = self._wait()
            left = self._most - len(self._made) - len(tokens)
            goes_on = goes_on and left > 0
            self.text += tokens.tolist()
            if goes_on:
                self._go_on(queued, drafted, left)
            self._put(tokens)
            if not goes_on:
                break
        if self._streamer is not None:
            self._streamer.end()
        return torch.stack(self._made, dim=1)

    def _ahead(self) -> tuple[bool, int]:
        """Queue what needs no report: (whether a plain step was, how many draft tokens were)."""
        run, left = self.run, self._most - len(self._made) - self._pending - 1
        wanted = self.pace.next(min(self.limit.most, left - 1))
        if self._pending:
            slot = run.slot + self._pending + 1
            if wanted and self.drafter.fits(slot):
                return False, self.drafter.propose(wanted)
            return False, 0
        if wanted or left <= 0:
            return False, 0
        run.advance()
        return True, 0

    def _wait(self) -> tuple[Tensor, bool]:
        """The tokens of the round under way, at least one, and whether the sequence goes on."""
        pending = self._pending
        if not pending:
            report = self._single.wait()
            found = report[:1], bool(report[1])
        else:
            outcome = self._several.wait()
            count = int(outcome[TOKENS])
            found = outcome[:count], bool(outcome[TOKENS + 1])
            self.drafter.accepted(self.run.slot, pending, count - 1)
            self.run.slot += count
            self.limit.learn(count - 1, pending)
        now = time.perf_counter()
        if self._began is not None:
            seconds = None if self.fresh else now - self._began
            self.pace.record(pending, len(found[0]) - 1, seconds)
            self.counts.add(pending, len(found[0]) - 1, now - self._began)
        self._began, self.fresh = now, False
        return found

    def _go_on(self, queued: bool, drafted: int, left: int) -> None:
        """Queue the rest of the next round. queued, drafted: as of `_ahead`."""
        if not queued:
            drafted = min(drafted or self._drafted(left), left - 1)
            check = self.check(drafted) if drafted > 0 else None
            if check is not None:
                self._check(check, drafted)
                return
            self.run.advance()
        self._choose()

    def _drafted(self, left: int) -> int:
        """Queue draft tokens now that the text is known; returns how many."""
        run, drafter = self.run, self.drafter
        wanted = self.pace.next(min(self.limit.most, left - 1))
        if not wanted or not drafter.fits(run.slot):
            return 0
        if drafter.behind(run.slot):
            self.fresh = drafter.catch_up(self.text, run.slot) or self.fresh
        return drafter.propose(wanted)

    def _check(self, check: Graph, drafted: int) -> None:
        tokens = next(size for size in SIZES if size > drafted)
        self.drafts.due.fill_(drafted)
        check.replay()
        self.fresh = self.fresh or not self.drafts.accepts(self._sampler, tokens)
        graph = self.run.runtime.captured.graph(self.run.step.batch.device)
        self.drafts.accepting(self._sampler, tokens, graph).replay()
        self._several.send()
        self._pending = drafted

    def _choose(self) -> None:
        self._graph.replay()
        self._single.send()
        self._pending = 0

    def _put(self, tokens: Tensor) -> None:
        """Emit tokens."""
        for token in tokens.split(1):
            if len(self._made) == self._most:
                break
            self._made.append(token)
            self.run.used(len(self._made) - 1)  # in case the streamer raises
            if self._streamer is not None:
                self._streamer.put(token)
