"""How many tokens are drafted: as many as pay, none where they do not, and again after a while."""

from __future__ import annotations

import random

import pytest

from accelpatch.runtime.generation.drafter import FIRST_WAIT, Limit, Pace


def simulated(
    right: float, plain: float, draft: float, check: float, tokens: int, most: int = 5, seed: int = 1
) -> tuple[float, Pace]:
    """(times as fast as plain steps over so many tokens, the Pace). Times in any unit; check: beyond a plain step's."""
    draw, pace, made, spent = random.Random(seed), Pace(), 0, 0.0
    while made < tokens:
        drafts = pace.next(most)
        accepted = 0
        while accepted < drafts and draw.random() < right:
            accepted += 1
        seconds = plain + (drafts * draft + check if drafts else 0.0)
        pace.record(drafts, accepted, seconds)
        made, spent = made + accepted + 1, spent + seconds
    return made * plain / spent, pace


@pytest.mark.parametrize(("draft", "check"), [(0.08, 0.18), (0.1, 0.34), (0.12, 0.58)])
def test_never_slower_than_without_drafts(draft: float, check: float) -> None:
    for right, due in ((1.0, 2.2), (0.7, 1.3), (0.0, 0.95)):
        for tokens in (512, 4096):
            rate, _ = simulated(right, 1.0, draft, check, tokens)
            assert rate > due, (right, tokens, rate)


def test_the_number_that_pays_most_is_found() -> None:
    _, pace = simulated(1.0, 1.0, 0.1, 0.2, 500, most=7)
    assert pace.next(7) == 7
    _, pace = simulated(0.45, 1.0, 0.15, 0.1, 500, most=7)
    assert 0 < pace.next(7) < 5


def test_they_are_tried_again_and_come_back() -> None:
    _, pace = simulated(0.0, 1.0, 0.1, 0.3, 100)
    assert pace.next(5) == 0
    for _ in range(10 * FIRST_WAIT):
        drafts = pace.next(5)
        pace.record(drafts, drafts, 1.0 + 0.1 * drafts)
        if drafts == 5:
            return
    raise AssertionError("they were not tried again")


def test_a_bad_start_does_not_end_drafts_that_pay() -> None:
    rates = sorted(simulated(0.7, 1.0, 0.2, 0.35, 700, seed=seed)[0] for seed in range(100))
    assert rates[10] > 1.1


def test_drafts_go_on_after_a_trial_that_was_mostly_right() -> None:
    _, pace = simulated(0.0, 1.0, 0.1, 0.3, 100)
    while not pace.next(5):
        pace.record(0, 0, 1.0)
    pace.record(pace.next(5), 2, None)  # three drafts, after a wait: their time has that of catching up in it
    assert pace.next(5) > 0


def test_the_schedules() -> None:
    class Config:
        num_assistant_tokens: int | None = 4
        num_assistant_tokens_schedule: str | None = "heuristic"

    config = Config()
    limit = Limit(config, 7)
    assert limit.most == 4
    limit.learn(4, 4)
    assert limit.most == 6
    limit.learn(2, 5)
    assert limit.most == 5
    limit.keep()
    assert config.num_assistant_tokens == 5
    config.num_assistant_tokens = config.num_assistant_tokens_schedule = None
    assert Limit(config, 7).most == 7  # 20, as transformers has it, and there is room for 7
