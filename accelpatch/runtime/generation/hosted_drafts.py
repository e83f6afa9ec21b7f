"""Drafts of a model where the host chooses each token: processors that look back, stop strings, scores asked for.

The draft tokens are read by the host and checked in one step; its places are then sampled one after the other, each
only once the draft token before it was chosen, so that processors and random numbers see what they see without drafts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from accelpatch.runtime.generation.drafted_loop import Checked, Drafted
from accelpatch.runtime.generation.drafter import PacedDrafter
from accelpatch.runtime.generation.speculation import Lookup
from accelpatch.runtime.graphs.drafts import DRAFTS


class HostDrafter(PacedDrafter):
    """Draft tokens by a draft model's captured step."""

    def __init__(self, drafted: Drafted):
        super().__init__(drafted.pace, drafted.limit, drafted.counts, drafted.text)
        self._drafted = drafted

    def proposed(self, most: int) -> list[int]:
        """As of PacedDrafter."""
        drafted, drafter = self._drafted, self._drafted.drafter
        if not drafter.fits(self._slot) or drafted.check(DRAFTS) is None:
            return []
        self.fresh, drafted.fresh = self.fresh or drafted.fresh, False
        self.fresh = drafter.catch_up(self.text, self._slot) or self.fresh
        found: list[int] = drafted.drafts.drafts.drafted[: drafter.propose(most)].tolist()
        return found

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """As of PacedDrafter."""
        self._drafted.drafter.accepted(slot, drafted, accepted)


class ModelLookup(Lookup):
    """Steps for the loop of the host, of which some check drafts."""

    def __init__(self, checked: Checked, ids: Tensor, end: int | None):
        super().__init__(checked.run, checked.drafts.drafts, ids, end)
        self._checked = checked

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """As of Lookup."""
        logits = (self._checked if isinstance(self._checked, Drafted) else self.run).prompt(ids, config, kwargs)
        self.known = self.drafter(ids)
        self.known.end = self._end
        return logits

    def drafter(self, ids: Tensor) -> PacedDrafter:
        """What proposes draft tokens after the prompt ids[1, L], which has run."""
        assert isinstance(self._checked, Drafted)
        return HostDrafter(self._checked)

    def draft(self) -> list[int] | None:
        """As of Lookup."""
        return self.known.draft()

    def verify(self, drafted: list[int]) -> None:
        """As of Lookup."""
        check = self._checked.check(DRAFTS)
        assert check is not None
        self.drafts.send([*drafted, *[0] * (DRAFTS - len(drafted))])
        check.replay()
        self.steps += 1

    def report(self, paths: Counter[str]) -> None:
        """As of Lookup."""
        if self._drafted:
            self.known.learn(self._drafted - len(self._due))
        if isinstance(self.known, PacedDrafter):
            self.known.finish()
        self._checked.counts.report(paths)
