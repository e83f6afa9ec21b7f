"""The sampler: picks the next token on the device, for the options of generate() that do not need the host.

Its report is copied to the host while the next step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from accelpatch.kernels import regions
from accelpatch.kernels.ops.sampling.greedy import greedy_, leave_
from accelpatch.runtime.graphs.logits_processors import WATCHING, Part, Tables, part_of, watches_once

# They read nothing but the scores, so transformers' own code can be captured and gives the same numbers.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
SUPPRESSING = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
SCORES = "scores"
CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


class Unknown(Exception):
    """A logits processor or stopping criterion that must run on the host; the message is its name."""


class Rows(Protocol):
    """What a sampler reads and writes: a Batch, or the places of Drafts, whose tensors are as Batch has them."""

    tokens: Tensor
    slot: Tensor
    logits: Tensor
    unfinished: Tensor
    report: Tensor
    ends: Tensor
    suppressed: Tensor
    suppressed_until: Tensor
    pad: Tensor
    arrived: Tensor
    tables: Tables


class Sampler:
    """The sampler for a generate() call whose prompt has `length` tokens. Raises Unknown where the host must sample.

    begun: the prompt's ids[B, length], where a processor may look back at them. watching: processors that are to be
    called with these and the first logits, whatever they return. keeps: whether the program leaves each token's scores
    in the batch's table SCORES[B, V].
    """

    def __init__(
        self, processors: Iterable[Any], criteria: Iterable[Any], do_sample: bool, length: int,
        begun: Tensor | None = None, keeps: bool = False,
    ):  # fmt: skip
        self._warpers: list[Any] = []
        self._suppressing: list[Any] = []
        self._parts: list[Part] = []
        self.watching: list[Any] = []
        self._length, self._do_sample, self._keeps = length, do_sample, keeps
        self.ends: Tensor | None = None
        left = list(CRITERIA)
        for criterion in criteria:
            if type(criterion) not in left:  # at most one of each: the program reads one length only
                raise Unknown(type(criterion).__name__)
            left.remove(type(criterion))
            self.ends = getattr(criterion, "eos_token_id", self.ends)
        for processor in processors:
            self._add(processor, begun)
        if len(self._suppressing) > 1 and any(
            p.eos_token_id is not self._suppressing[0].eos_token_id for p in self._suppressing
        ):
            raise Unknown("minimum lengths with different end-of-sequence ids")

    def _add(self, processor: Any, begun: Tensor | None) -> None:
        """Take a processor, behind those before it; raises Unknown."""
        unchanged = not (self._suppressing or self._parts or self._warpers)
        if type(processor) in SUPPRESSING and not self._parts and not self._warpers:
            self._suppressing.append(processor)
        elif type(processor) in WARPERS:
            self._warpers.append(processor)
        elif type(processor) in WATCHING and begun is not None and watches_once(processor, begun, unchanged):
            self.watching.append(processor)
        else:
            part = None if self._warpers else part_of(processor, f"processor {len(self._parts)}", begun)
            if part is None or any(one.key == part.key for one in self._parts):
                raise Unknown(type(processor).__name__)
            self._parts.append(part)

    @property
    def key(self) -> Any:
        """Samplers with equal keys can share one captured program."""
        warpers = tuple((type(one), tuple(sorted(vars(one).items()))) for one in self._warpers)
        parts = tuple(one.key for one in self._parts)
        return self._do_sample, self._keeps, bool(self._suppressing), self.ends is not None, parts, warpers

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return self._do_sample

    @property
    def alone(self) -> bool:
        """Whether a token depends only on its row's logits and length, so that many places can be sampled at once."""
        return not self._do_sample and not self._warpers and all(part.alone for part in self._parts)

    @property
    def suppressed(self) -> Tensor | None:
        """The ids to suppress until the minimum length, or None."""
        return self._suppressing[0].eos_token_id if self._suppressing else None

    def suppressed_until(self, slot: int) -> int:
        """Number of cached tokens from which on ids are not suppressed. slot: tokens cached after the prompt."""
        least = [
            one.min_length if type(one) is MinLengthLogitsProcessor else one.prompt_length_to_skip + one.min_new_tokens
            for one in self._suppressing
        ]
        return max(least, default=0) + slot - self._length

    def make_tables(self, batch: Any) -> None:
        """Make what the program reads of a Batch besides its own tensors, before it is captured."""
        with torch.inference_mode(False):
            if self._keeps and SCORES not in batch.tables:
                batch.tables[SCORES] = torch.zeros_like(batch.logits)
            for part in self._parts:
                part.make(batch.tables, batch)

    def begin_tables(self, batch: Any, slot: int) -> None:
        """Set it, for rows with `slot` cached tokens."""
        for part in self._parts:
            part.begin(batch.tables, batch, slot - self._length)

    def scores(self, rows: Rows) -> Tensor:
        """rows.logits [B, V] as all processors leave them."""
        scores = rows.logits
        if self._suppressing:
            scores = scores.masked_fill(
                (rows.slot[:, None] < rows.suppressed_until) & rows.suppressed[:-1], float("-inf")
            )
        for part in self._parts:
            scores = part.scores(rows.tables, rows.slot, scores)
        return self.warped(scores)

    def warped(self, scores: Tensor) -> Tensor:
        """scores [B, V] after temperature, top-k, top-p and min-p, where they are asked for."""
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores

    @regions.within("sampler")
    def next_token(self, rows: Rows) -> None:
        """The program: rows.logits -> rows.tokens, unfinished and report. Among equal logits the lowest id wins."""
        scores = self.scores(rows)
        if self._keeps:
            rows.tables[SCORES].copy_(scores)
        state = (rows.unfinished, None if self.ends is None else rows.ends, rows.pad, rows.tokens, rows.report)
        if self._do_sample:
            leave_(drawn(nn.functional.softmax(scores, dim=-1)), *state)
        else:
            greedy_(scores, *state, rows.arrived)
        for part in self._parts:
            part.chosen(rows.tables, rows.slot, rows.tokens)


def drawn(chances: Tensor) -> Tensor:
    """One index a row of chances[B, V], as torch.multinomial draws it, without its checks, which cannot be captured."""
    return (chances / torch.empty_like(chances).exponential_(1)).argmax(dim=-1)


class Reports:
    """Asynchronous copies of a report to the host, one at a time: each is taken before the next sampler is queued.

    On a GPU they run on their own stream, so that nothing after the sampler waits for them. As the host takes a report
    before it queues the next sampler, that one cannot overwrite a report that is still being copied. (After an
    exception it may; that copy is not used.)
    """

    def __init__(self, report: Tensor):
        self._report, device = report, report.device
        self._copy_stream = _copy_stream(device.index or 0) if device.type == "cuda" else None
        self._on_host = torch.empty(
            report.shape, dtype=torch.int64, device="cpu", pin_memory=self._copy_stream is not None
        )
        if self._copy_stream is not None:
            self._chosen, self._copied = torch.cuda.Event(), torch.cuda.Event()
            report.record_stream(self._copy_stream)  # a copy that is not waited for may outlive the report's owner

    def send(self) -> None:
        """Queue a copy after the work queued so far on the current stream."""
        if self._copy_stream is None:
            self._on_host.copy_(self._report)
            return
        self._chosen.record(torch.cuda.current_stream(self._report.device))
        self._copy_stream.wait_event(self._chosen)
        with torch.cuda.stream(self._copy_stream):
            self._on_host.copy_(self._report, non_blocking=True)
        self._copied.record(self._copy_stream)

    def wait(self) -> Tensor:
        """The report sent last, int64; waits for its copy only."""
        if self._copy_stream is not None:
            self._copied.synchronize()
        return self._on_host.clone()


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """The stream for all copies from one GPU.

    It has a priority of its own: torch may hand out one stream twice for the same priority, and a capture may be going
    on there.
    """
    return torch.cuda.Stream(index, priority=-1)
