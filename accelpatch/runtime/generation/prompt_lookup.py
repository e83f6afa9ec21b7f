"""Draft tokens by prompt lookup: what followed the last tokens at an earlier place in the prompt or the answer.

Saxena 2023, "Prompt Lookup Decoding". Places are found as in Lempel-Ziv compressors, by chains of earlier places of the
last pair of tokens, so that the cost per token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterable

DRAFTS = 7  # draft tokens per step; with the last token, a step of eight
SHORTEST = 2  # least length of a match in tokens
LONGEST = 16  # longer matches are not distinguished
CANDIDATES = 16  # most earlier places compared
NOWHERE = -1


class PromptLookup:
    """The tokens of one sequence so far, and their draft tokens.

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
