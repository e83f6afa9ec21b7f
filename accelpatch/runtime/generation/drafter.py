"""What proposes draft tokens for a row of generate(), and how many are worth while.

A Drafter proposes some tokens that may follow the text, and the target model checks them in one step of several tokens.
The drafter then learns how many were accepted, and what the text became; what it has of the others is rolled back.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, Protocol

from accelpatch.report import DRAFT_CHECKS, DRAFTED, DRAFTS_ACCEPTED

SAVED = "milliseconds that drafts of a model saved"

NUMBERS = (1, 3, 5, 7)  # of draft tokens that are tried
AGAIN = 64  # rounds with drafts after which a plain step is timed again
HOPE = 1.2  # how much faster a number of drafts is taken to be than it seems, until its time is known
MEASURED = 2  # plain steps whose time must be known before anything is drafted
WINDOW = 8  # latest rounds with a number of drafts whose times count
FADING = 0.97  # the weight of a draft token's acceptance in the running mean, relative to that of the next
PRIOR, PRIOR_WEIGHT = 0.75, 4.0  # acceptance that is assumed before anything is known, and tokens that it is worth
CHECK, DRAFT = 0.15, 0.12  # of a plain step: what checking, and one draft token, is taken to cost before it is measured
FIRST_WAIT, LONGEST_WAIT = 64, 1024  # plain tokens until drafts that lost are tried again; doubled each time
NUMBER, THRESHOLD = 20, 0.4  # what transformers takes where a generation config says nothing
TRIAL = 3  # drafts of the first round after a wait
RESUMED = 1.0  # draft tokens that the acceptance before a wait is worth after it


class Drafter(Protocol):
    """Draft tokens for one sequence, whose text so far it knows."""

    def __len__(self) -> int:
        """Tokens of the text."""

    def append(self, token: int) -> None:
        """The text has a token more. What was drafted in its place and behind it is rolled back, where it differs."""

    def draft(self) -> list[int] | None:
        """Draft tokens after the text, or None for none."""

    def learn(self, accepted: int) -> None:
        """So many of the tokens drafted last were accepted."""


class Pace:
    """Chooses the number of draft tokens of the next round by what rounds gave and took so far.

    A round of k draft tokens yields 1 + p + ... + p^k tokens where each is accepted with probability p. Its time is
    the median of the latest ones with as many; between those that are known it is interpolated. Where no number of
    drafts beats a plain step, none are made for a while, and then few again.
    """

    def __init__(self) -> None:
        self._right, self._wrong = PRIOR * PRIOR_WEIGHT, (1 - PRIOR) * PRIOR_WEIGHT
        self._times: dict[int, deque[float]] = {}
        self._resting, self._left = False, 0  # whether drafts have lost; plain tokens until they are tried again
        self._wait = FIRST_WAIT
        self._rounds = 0  # with drafts, since the last plain step

    @property
    def probability(self) -> float:
        """Of a draft token to be accepted, when all before it were."""
        return self._right / (self._right + self._wrong)

    @property
    def plain(self) -> float | None:
        """Seconds of a plain step, where they are known."""
        return self.seconds(0) if self._times.get(0) else None

    def next(self, most: int) -> int:
        """Draft tokens of the next round, 0 to `most`."""
        if most <= 0 or self._left or self._rounds >= AGAIN or len(self._times.get(0, ())) < MEASURED:
            return 0
        if self._resting:
            return min(TRIAL, most)
        best = max((0, *(k for k in NUMBERS if k < most), most), key=self._rate)
        if best == 0:
            self._rest()
        return best

    def _rate(self, drafts: int) -> float:
        """Expected tokens a second; more than that where no time is known, so that it becomes known."""
        rate = self.tokens(drafts) / self.seconds(drafts)
        return rate if self._times.get(drafts) else rate * HOPE

    def tokens(self, drafts: int) -> float:
        """Expected tokens of a round."""
        return float(sum(self.probability**k for k in range(drafts + 1)))

    def seconds(self, drafts: int) -> float:
        """Expected time of a round; in plain steps where no time is known."""
        known = {k: sorted(times)[len(times) // 2] for k, times in self._times.items()}
        if drafts in known:
            return known[drafts]
        plain = known.get(0, 1.0)
        above = min((k for k in known if k > drafts), default=None)
        below = max((k for k in known if k < drafts), default=0)
        first = known[below] if below else plain * (1 + CHECK)
        if above is None:
            return first + plain * DRAFT * (drafts - below)
        return first + (known[above] - first) * (drafts - below) / (above - below)

    def record(self, drafts: int, accepted: int, seconds: float | None) -> None:
        """A round with so many draft tokens is over. seconds: None where they say nothing, as after a capture."""
        if seconds is not None:
            self._times.setdefault(drafts, deque(maxlen=WINDOW)).append(seconds)
        if not drafts:
            self._left, self._rounds = max(self._left - 1, 0), 0
            return
        self._rounds += 1
        wrong = int(accepted < drafts)
        fading = FADING ** (accepted + wrong)
        self._right = self._right * fading + accepted
        self._wrong = self._wrong * fading + wrong
        if self._resting and not accepted:
            self._rest()
        elif self._resting:  # the text is another one by now: what is known of drafts before the wait counts little
            self._resting = False
            weight = RESUMED / (self._right + self._wrong)
            self._right, self._wrong = accepted + self._right * weight, wrong + self._wrong * weight
        if not wrong:
            self._wait = FIRST_WAIT

    def _rest(self) -> None:
        self._resting, self._left = True, self._wait
        self._wait = min(self._wait * 2, LONGEST_WAIT)


class Limit:
    """The most draft tokens of a round, as an assistant's generation config has them: num_assistant_tokens and its
    schedule. most: no more than `room`."""

    def __init__(self, config: Any, room: int):
        self._asked = int(_given(config, "num_assistant_tokens", NUMBER))
        self._schedule = _given(config, "num_assistant_tokens_schedule", "constant")
        self._config, self._room = config, room
        self.off = False  # whether nothing more is to be drafted in this call

    @property
    def most(self) -> int:
        """The most draft tokens of the next round."""
        return 0 if self.off else min(self._asked, self._room)

    def learn(self, accepted: int, drafted: int) -> None:
        """Adapt to a round, as the schedule says."""
        if self._schedule in ("heuristic", "heuristic_transient"):
            self._asked = self._asked + 2 if accepted == drafted else max(1, self._asked - 1)

    def keep(self) -> None:
        """At the end of a call: the schedule `heuristic` goes on with this number in the next one."""
        if self._schedule == "heuristic":
            self._config.num_assistant_tokens = self._asked


def threshold_of(config: Any) -> float:
    """The probability of a draft token below which drafting stops, 0 for never."""
    return float(_given(config, "assistant_confidence_threshold", THRESHOLD))


def _given(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


class Counts:
    """What became of the drafts of one call. checks: rounds with drafts; drafted, accepted: tokens."""

    def __init__(self, pace: Pace):
        self._pace = pace
        self.checks = self.drafted = self.accepted = 0
        self._seconds = 0.0  # of rounds with drafts

    def add(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round is over."""
        if drafted:
            self.checks += 1
            self.drafted += drafted
            self.accepted += accepted
            self._seconds += seconds

    def report(self, paths: Counter[str]) -> None:
        """Count them in a report's paths."""
        if not self.checks:
            return
        paths[DRAFT_CHECKS] += self.checks
        paths[DRAFTED] += self.drafted
        paths[DRAFTS_ACCEPTED] += self.accepted
        if (plain := self._pace.plain) is not None:
            paths[SAVED] += round(1000 * ((self.checks + self.accepted) * plain - self._seconds))


class PacedDrafter:
    """A Drafter that drafts as many tokens as pay. counts: what became of them. text: the tokens so far.

    fresh: whether something was captured, or many tokens caught up with, meanwhile, so that times say nothing. end:
    the most tokens of the sequence.
    """

    end: int | None = None

    def __init__(self, pace: Pace, limit: Limit, counts: Counts, text: list[int]):
        self.pace, self.limit, self.counts, self.text = pace, limit, counts, text
        self.fresh = False
        self._asked = self._accepted = 0  # of the last round
        self._slot = 0  # of the last token of the text, when it began
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self.text)

    def append(self, token: int) -> None:
        """As of Drafter."""
        self.text.append(token)

    def draft(self) -> list[int] | None:
        """As of Drafter."""
        now = time.perf_counter()
        if self._began is not None:
            self.pace.record(self._asked, self._accepted, None if self.fresh else now - self._began)
            self.counts.add(self._asked, self._accepted, now - self._began)
        self._began, self.fresh = now, False
        self._slot = len(self.text) - 1
        left = self.limit.most if self.end is None else self.end - len(self.text) - 1
        wanted = self.pace.next(min(self.limit.most, left))
        found = self.proposed(wanted) if wanted else []
        self._asked, self._accepted = len(found), 0
        return found or None

    def learn(self, accepted: int) -> None:
        """As of Drafter."""
        self._accepted = min(accepted, self._asked)
        self.rolled_back(self._slot, self._asked, self._accepted)
        self.limit.learn(self._accepted, self._asked)

    def finish(self) -> None:
        """The call is over: count what became of the last draft tokens."""
        if self._began is not None:
            self.counts.add(self._asked, self._accepted, time.perf_counter() - self._began)

    def proposed(self, most: int) -> list[int]:
        """Up to so many draft tokens after the text; [] for none."""
        raise NotImplementedError

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """Of the tokens drafted after the one at `slot`, so many were accepted: the others are forgotten."""
        raise NotImplementedError
