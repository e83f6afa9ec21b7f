"""Stop texts: an answer ends before the first of them, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class Cut:
    """Text that comes in pieces, up to the first stop text. ended: whether one was seen."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.ended = stops, "", False

    def add(self, piece: str) -> str:
        """What is now known to belong to the answer; what may be the begin of a stop text is held back."""
        if self.ended:
            return ""
        text = self._held + piece
        found = [place for one in self._stops if (place := text.find(one)) >= 0]
        if found:
            self.ended, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, one) for one in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """What was held back, at the end of all pieces."""
        kept_back, self._held = self._held, ""
        return kept_back


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of a text that is a begin of the stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def taken_from(config: Any) -> list[str]:
    """The stop texts of a generation config, which has none afterwards."""
    found, config.stop_strings = config.stop_strings or [], None
    return [found] if isinstance(found, str) else list(found)


def cut(text: str, stops: Sequence[str]) -> str:
    """A whole answer up to the first stop text."""
    piece = Cut(stops)
    return piece.add(text) + piece.rest()


class Pieces:
    """The text of tokens that come one by one, as tokenizers' DecodeStream gives it, which raises for some bytes that
    are no UTF-8 (vocabularies with a token for each byte, as Llama 2's)."""

    def __init__(self, skip_special_tokens: bool = True):
        self._skipping = skip_special_tokens
        self._ids, self._read = list[int](), 0  # the last ids, of which the text of the first ones was given

    def step(self, tokenizer: Any, token: int) -> str | None:
        """What a token adds; None where it ends within a character. tokenizer: of the library tokenizers."""
        self._ids.append(token)
        before, now = (tokenizer.decode(ids, self._skipping) for ids in (self._ids[: self._read], self._ids))
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return None
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        piece: str = now[len(before) :]
        return piece

    @classmethod
    def of_streamer(cls, streamer: Any) -> None:
        """One of transformers' streamers takes its pieces from here."""
        if hasattr(streamer, "_decode_stream"):
            streamer._decode_stream = cls(getattr(streamer, "_parser", None) is None)


class Watch(StoppingCriteria):
    """Whether the tokens of an answer have come to a stop text; also as a criterion of generate() for one prompt.

    transformers' own criterion looks at each token of the vocabulary before the first answer, and misses texts in
    vocabularies of bytes. tokenizer: a fast one.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._cut, self._tokenizer, self._pieces = Cut(stops), tokenizer._tokenizer, Pieces()

    @property
    def ended(self) -> bool:
        """Whether a stop text was seen."""
        return self._cut.ended

    def over(self, token: int) -> bool:
        """Whether the answer ends with this token."""
        piece = self._pieces.step(self._tokenizer, token)
        if piece is not None:
            self._cut.add(piece)
        return self._cut.ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([self.over(int(input_ids[0, -1]))], device=input_ids.device)


class CutQueue:
    """The queue of a stream's pieces as transformers' handlers read it, without the stop texts.

    Pieces of text are of the type str itself; None ends them. All else, such as calls of tools, goes through.
    """

    def __init__(self, inner: asyncio.Queue[Any], stops: Sequence[str]):
        self._inner, self._cut, self._ready = inner, Cut(stops), deque[Any]()

    async def get(self) -> Any:
        """As asyncio.Queue has it."""
        while not self._ready:
            self._add(await self._inner.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """As asyncio.Queue has it. Raises asyncio.QueueEmpty."""
        while not self._ready:
            self._add(self._inner.get_nowait())
        return self._ready.popleft()

    def _add(self, item: Any) -> None:
        text = self._cut.add(item) if type(item) is str else self._cut.rest()
        if text:
            self._ready.append(text)
        if type(item) is not str:
            self._ready.append(item)
