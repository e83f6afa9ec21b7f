"""The drafts of prompt lookup, against a search through all that is known."""

from __future__ import annotations

import random
import time

import pytest

from accelpatch.runtime.generation.speculation import CANDIDATES, DRAFTS, LONGEST, SHORTEST, PromptLookup


def searched(tokens: list[int], asked: int = SHORTEST) -> list[int] | None:
    """The same by looking at every place: the latest of the longest matches among the last CANDIDATES pairs."""
    last, found = len(tokens) - 1, []
    for place in range(last - 1, 0, -1):
        length = 0
        while length <= place and length < LONGEST and tokens[place - length] == tokens[last - length]:
            length += 1
        if length >= 2:
            found.append((length, place))
    long = [one for one in found[:CANDIDATES] if one[0] >= asked]
    if not long:
        return None
    place, known = max(long)[1], list(tokens)
    for ahead in range(DRAFTS):
        known.append(known[place + 1 + ahead])
    return known[len(tokens) :]


@pytest.mark.parametrize("words", [1, 2, 3, 8, 40], ids=lambda words: f"{words}-words")
def test_the_drafts_of_a_full_search(words: int) -> None:
    draw = random.Random(words)
    for start in (0, 1, 2, 3, 30):
        tokens = [draw.randrange(words) for _ in range(start)]
        lookup = PromptLookup(tokens)
        for _ in range(150):
            assert lookup.draft() == searched(tokens)
            tokens.append(draw.randrange(words))
            lookup.append(tokens[-1])


@pytest.mark.parametrize(
    ("tokens", "due"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], [3, 4, 5, 6, 7, 8, 9], id="what-followed"),
        pytest.param([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2, 4, 9, 1], id="the-latest-and-round-again"),
        pytest.param([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2, 4, 7, 1], id="the-longest"),
        pytest.param([5, 5, 5], [5] * 7, id="one-word"),
        pytest.param([1, 2, 3, 4, 2], None, id="one-word-is-too-little"),
        pytest.param([], None, id="nothing"),
        pytest.param([3], None, id="one"),
    ],
)
def test_drafts(tokens: list[int], due: list[int] | None) -> None:
    assert PromptLookup(tokens).draft() == due


def test_failures_ask_for_longer_matches_and_successes_for_shorter_ones() -> None:
    lookup = PromptLookup([9, 1, 2, 3, 4, 5, 8, 3, 4, 5])  # three match
    assert lookup.draft() is not None
    lookup.learn(0)
    assert lookup.draft() is None
    lookup.learn(1)
    assert lookup.draft() == [8, 3, 4, 5, 8, 3, 4]
    for _ in range(10):
        lookup.learn(0)
    assert lookup.draft() is None
    again = PromptLookup(list(range(20)) * 2)
    for _ in range(10):
        again.learn(0)
    assert again.draft() == [0, 1, 2, 3, 4, 5, 6]  # a match of the greatest length counts always


@pytest.mark.parametrize("period", [1, 2, 1000, 10**6], ids=lambda period: f"period-{period}")
def test_a_token_costs_the_same_after_many(period: int) -> None:
    draw = random.Random(3)
    block = [draw.randrange(1000) for _ in range(min(period, 200_000))]
    tokens = block * (200_000 // len(block))
    lookup = PromptLookup(tokens)
    begun = time.perf_counter()
    for token in tokens[:1000]:
        lookup.draft()
        lookup.append(token)
    assert time.perf_counter() - begun < 1.0  # a scan of all of them a step takes 20 s or more
