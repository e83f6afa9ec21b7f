"""Drafts of the next tokens: what followed the last ones where they stood before, in the prompt or in the answer.

As Saxena 2023, "Prompt Lookup Decoding". Places are found as Lempel-Ziv compressors find them, by chains of earlier
places of the last pair: a token more costs the same after ten tokens and after a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Iterable

DRAFTS = 7  # with the last known token a step of eight
SHORTEST = 2  # tokens that must match
LONGEST = 16  # a longer match counts as this one
CANDIDATES = 16  # earlier places that are compared
NOWHERE = -1


class PromptLookup:
    """The tokens of one sequence so far, and the drafts that they allow.

    Drafts that fail cost a step of several tokens for one: each step without a right one doubles the match that is
    asked for, each with one halves it.
    """

    def __init__(self, tokens: Iterable[int]):
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # a pair -> where it ended last, the end of the tokens apart
        self._earlier: list[int] = []  # by place: where the pair that ends there ended before
        self._asked = SHORTEST
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        """One token more."""
        tokens, last = self._tokens, len(self._tokens) - 1
        if last >= 1:
            pair = (tokens[last - 1], tokens[last])
            self._earlier.append(self._latest.get(pair, NOWHERE))
            self._latest[pair] = last
        elif last == 0:
            self._earlier.append(NOWHERE)
        tokens.append(token)

    def draft(self) -> list[int] | None:
        """The next DRAFTS tokens, or None where the last ones are new.

        Of the longest matches the latest; what follows it is repeated where it reaches the end of what is known.
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
        """How many drafts of a step were right."""
        self._asked = max(self._asked // 2, SHORTEST) if accepted else min(self._asked * 2, LONGEST)

    def _match(self, place: int, last: int) -> int:
        """How many tokens up to `place` are those up to `last`, of which two are; LONGEST at most."""
        tokens, length = self._tokens, 2
        while length < LONGEST and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        return length
