"""Which cached tokens the new tokens of several texts attend to, where keys and values lie in pages."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.spec import Described


@dataclass(frozen=True, eq=False)
class Text:
    """One text's part of a call: its new tokens are the rows first .. last - 1, and the tokens cached before them those
    at index[begin] .. index[begin + past - 1], the oldest first."""

    first: int
    last: int
    begin: int
    past: int


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
    def single(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Of the texts with one new token, on the CPU: their rows[R]; index[n] of all that they attend to, the new ones
        at the places where they are written; starts[R] and ends[R] in it. None where there are none."""
        texts = [text for text in self.texts if text.last - text.first == 1]
        if not texts:
            return None
        index, write, found, ends = self.index.tolist(), self.write.tolist(), list[int](), list[int]()
        for text in texts:
            found += index[text.begin : text.begin + text.past]
            found.append(write[text.first])
            ends.append(len(found))
        return (
            torch.tensor([text.first for text in texts]), torch.tensor(found), torch.tensor([0, *ends[:-1]]),
            torch.tensor(ends),
        )  # fmt: skip

    def placed(self, text: Text) -> Tensor:
        """index[past] of a text's cached tokens."""
        return self.index[text.begin : text.begin + text.past]
