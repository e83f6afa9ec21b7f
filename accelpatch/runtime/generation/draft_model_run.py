"""The draft model of one call of generate() over captured steps: its own step, cache and prompt.

Its cache holds the tokens of the text up to a place, and draft tokens behind it. How far the text goes is known to the
device alone while rounds with draft tokens follow each other (graphs/draft_model.py). After plain steps of the target,
which it did not see, the tokens that are missing are cached first, several in one step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.spread import device_of
from accelpatch.runtime.cache_contents import OWN_CACHE
from accelpatch.runtime.cache_form import misfit, why_not
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.graphs.draft_model import DraftPrograms, DraftStep, ExitStep
from accelpatch.runtime.graphs.drafts import TOKENS
from accelpatch.runtime.graphs.model_drafts import ModelDrafts
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import Reports, Sampler
from accelpatch.runtime.graphs.step import Batch

PROGRAMS = 4  # sets of programs that a draft step keeps: one for each target and sampler


class DraftRun:
    """Draft tokens of one call, by a step over a cache. confidence: drafting stops at a token with a lower probability;
    0: at none."""

    def __init__(self, step: DraftStep, drafts: ModelDrafts, sampler: Sampler, confidence: float):
        self.step, self.drafts, self._sampler = step, drafts, sampler
        self._confident = confidence > 0
        drafts.threshold.fill_(confidence)
        self._sure = Reports(drafts.sure)
        self.programs: DraftPrograms | None = None

    def prepare(self, graph: Any, empty: bool) -> None:
        """Capture the programs where that was not done. empty: as of DraftPrograms."""
        key, programs = (id(self.drafts), self._sampler.key, self._confident), self.step.drafting
        if key not in programs:
            programs[key] = DraftPrograms(self.step, self.drafts, self._sampler, self._confident, graph, empty)
            while len(programs) > PROGRAMS:
                del programs[next(iter(programs))]
        self.programs = programs[key]

    def prompt(self, ids: Tensor, mask: Tensor | None) -> None:
        """Cache the prompt ids[1, L]; mask[1, L] hides padding."""

    def fits(self, slot: int) -> bool:
        """Whether there is room for TOKENS tokens more behind `slot`."""
        return True

    def behind(self, slot: int) -> int:
        """How many tokens before `slot` - 1 are not cached."""
        return 0

    def catch_up(self, text: list[int], slot: int) -> bool:
        """Cache the tokens of the text before `slot`, which is that of its last token; whether they were many."""
        return False

    def propose(self, most: int) -> int:
        """Queue draft tokens; returns how many: `most`, or fewer where one was unlikely."""
        assert self.programs is not None
        self.programs.begin.replay()
        for place in range(1, most):
            if self._confident:
                self._sure.send()
            self.programs.go_on.replay()
            if self._confident and not int(self._sure.wait()[place - 1]):  # read while the next one is computed
                return place
        return most

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """Of the tokens drafted behind `slot`, so many were accepted."""

    def close(self) -> None:
        """The call is over."""


class AssistantRun(DraftRun):
    """Draft tokens of an assistant model, by its captured step."""

    def __init__(
        self, model: Any, runtime: CapturedRuntime, drafts: ModelDrafts, sampler: Sampler, confidence: float,
        most: int,
    ):  # fmt: skip
        self._model, self._runtime = model, runtime
        self.run = CapturedRun(model, runtime, runtime.step(model, 1, runtime.room(most, None)))
        super().__init__(self.run.step, drafts, sampler, confidence)
        self._cached = 0
        self.prepare(runtime.captured.graph(self.step.batch.device), empty=True)

    def prompt(self, ids: Tensor, mask: Tensor | None) -> None:
        """As of DraftRun."""
        mask = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        cache = cache_for(self._model)
        setattr(cache, OWN_CACHE, True)
        given = {"attention_mask": mask, "use_cache": True, CACHE: cache}
        given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        config = self._model.generation_config
        self.run.prompt(ids, config, given)
        self.run.slot = self._cached = ids.shape[1]
        self.drafts.before.copy_(ids[0, -1:])

    def fits(self, slot: int) -> bool:
        """As of DraftRun."""
        return slot + 2 * TOKENS <= self.run.step.capacity

    def behind(self, slot: int) -> int:
        """As of DraftRun."""
        return max(slot - 1 - self._cached, 0)

    def catch_up(self, text: list[int], slot: int) -> bool:
        """As of DraftRun."""
        batch, many = self.step.batch, self.behind(slot) > TOKENS
        assert self.programs is not None
        offset = self.drafts.batch.positions - self.drafts.batch.slot
        while self._cached < slot - 1:
            batch.slot.fill_(self._cached)
            batch.positions.copy_(offset + self._cached)
            missing = text[self._cached : min(slot - 1, self._cached + TOKENS)]
            if self.programs.feed is None:
                batch.tokens.fill_(missing[0])
                self.run.step.replay()
                self._cached += 1
            else:
                padded = [*missing, *[0] * (TOKENS - len(missing))]
                self.programs.fed.copy_(torch.tensor(padded))
                self.programs.feed.replay()
                self._cached += len(missing)
        self.drafts.before.fill_(text[slot - 1])
        return many

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        """As of DraftRun."""
        self._cached = slot + min(accepted + 1, drafted)

    def close(self) -> None:
        """As of DraftRun."""
        with self.run:
            pass  # the cache of the prompt gets nothing back: nobody sees it


class ExitRun(DraftRun):
    """Draft tokens of the first `layers` layers of the target, which exits after them; over the target's own cache."""

    def __init__(self, run: CapturedRun, layers: int, drafts: ModelDrafts, sampler: Sampler, confidence: float):
        self._run, self._whole, fused = run, run.step, run.step.fused
        assert fused is not None
        if layers not in run.step.exits:
            run.step.exits[layers] = ExitStep(run.step, fused.first(layers))
        super().__init__(run.step.exits[layers], drafts, sampler, confidence)
        self.prepare(run.runtime.captured.graph(run.step.batch.device), empty=True)

    def fits(self, slot: int) -> bool:
        """As of DraftRun: not in the larger cache that the target goes on with when this one is full."""
        return self._run.step is self._whole and slot + 2 * TOKENS <= self._whole.capacity


def why_not_assistant(model: Any, runtime: CapturedRuntime, target: Batch, most: int) -> str | None:
    """Why a model's captured steps cannot draft for a target of one row; None where they can."""
    if device_of(model) != target.device:
        return f"the assistant lies on {device_of(model)}"
    if model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model):
        return "a hook on the assistant"
    if runtime.max_length is not None and most > runtime.max_length:
        return f"the assistant's recipe has a max_length of {runtime.max_length}"
    cache = cache_for(model)
    reason = why_not(cache) or runtime.why_not(model) or misfit(cache, runtime.captured.cached)
    return None if reason is None else f"the assistant: {reason}"


def cache_for(model: Any) -> DynamicCache:
    """A new cache of a model."""
    return DynamicCache(config=model.config)
