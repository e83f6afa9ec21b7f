"""Which cached tokens the new tokens of several texts attend to, where keys and values lie in pages."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.spec import Described

SHORT = 256  # tokens of a text up to which a CPU's attention by rows is faster than that of prompts
#: new tokens on the CPU: their rows[R]; index[n] of all that they attend to, new ones at the places where they are
#: written; starts[R] and ends[R] in it
Attended = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Text:
    """One text's part of a call: its new tokens are the rows first .. last - 1, and the tokens cached before them those
    at index[begin] .. index[begin + past - 1], the oldest first."""

    first: int
    last: int
    begin: int
    past: int

    @property
    def is_short(self) -> bool:
        """Whether it has one new token, or SHORT tokens at most."""
        new = self.last - self.first
        return new == 1 or self.past + new <= SHORT


@dataclass(frozen=True, eq=False)
class PagedRows(Described):
    """What all layers of one kind share in a call of T new tokens, those of one text after those of another.

    queries[B + 1] int32: where each text's new tokens begin; the last number is their end, T or less. keys[B + 1]
    int32: the same of each text's tokens in index, of which the last ones stand for the new ones. index[N] int64: where
    tokens lie; empty where no text has cached tokens, and then keys is not read. write[T] int64: where the new tokens'
    keys and values go. longest: most new tokens of a text, or more.
    """

    queries: Tensor
    keys: Tensor
    index: Tensor
    write: Tensor
    longest: int

    @property
    def facts(self) -> Hashable:
        """No choice depends on them."""
        return None

    @functools.cached_property
    def texts(self) -> list[Text]:
        """The texts that have new tokens; waits for the device."""
        queries = self.queries.tolist()
        keys = self.keys.tolist() if self.index.numel() else queries
        pairs = zip(queries, queries[1:], keys, keys[1:], strict=False)
        return [Text(a, b, c, d - c - (b - a)) for a, b, c, d in pairs if b > a]

    @functools.cached_property
    def single(self) -> Attended | None:
        """Of the texts with one new token; None where there are none."""
        return self._attended([text for text in self.texts if text.last - text.first == 1])

    @functools.cached_property
    def short(self) -> Attended | None:
        """Of the texts with one new token, and of prompts whose text has SHORT tokens at most; None without any."""
        return self._attended([text for text in self.texts if text.is_short])

    def _attended(self, texts: Sequence[Text]) -> Attended | None:
        if not texts:
            return None
        index, write = self.index.tolist(), self.write.tolist()
        own, found, starts, ends = list[int](), list[int](), list[int](), list[int]()
        for text in texts:
            first = len(found)
            found += index[text.begin : text.begin + text.past]
            ends += range(len(found) + 1, len(found) + 1 + text.last - text.first)
            found += write[text.first : text.last]
            own += range(text.first, text.last)
            starts += [first] * (text.last - text.first)
        return torch.tensor(own), torch.tensor(found), torch.tensor(starts), torch.tensor(ends)

    def placed(self, text: Text) -> Tensor:
        """index[past] of a text's cached tokens."""
        return self.index[text.begin : text.begin + text.past]
