"""Logits processors of transformers as parts of the sampler's captured program: suppressed and forced ids, timestamps.

What differs from call to call lies in tensors of the batch that the program reads: tables of ids, and the number of
cached tokens at which a processor acts. So one program serves all calls with processors of the same kinds in the same
order, and no step waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperNoSpeechDetection,
    WhisperTimeStampLogitsProcessor,
)

Tables = dict[str, Tensor]  # of a batch, by the names of parts
INFINITY = float("inf")


class SuppressedIds:
    """Ids whose scores are -inf. at: the length of the sequence at which they are; None for always."""

    alone = True  # whether a token depends only on its row's logits and length

    def __init__(self, name: str, ids: Tensor, at: int | None = None):
        self._name, self._ids, self._at = name, ids, at

    @property
    def key(self) -> Any:
        """Parts with equal keys are the same program over the same tensors."""
        return type(self).__name__, self._name, self._at is not None

    def make(self, tables: Tables, batch: Any) -> None:
        """Add the tensors that the program reads, for a batch whose vocabulary has V ids, where they are not there."""
        if self._name not in tables:
            tables[self._name] = torch.zeros_like(batch.ends)
            tables[f"{self._name} at"] = torch.zeros_like(batch.pad)

    def begin(self, tables: Tables, batch: Any, cached: int) -> None:
        """Set them. cached: tokens in the cache beyond those of the sequence, as a cache of the caller's may have."""
        mark(tables[self._name], self._ids)
        tables[f"{self._name} at"].fill_(0 if self._at is None else self._at + cached)

    def scores(self, tables: Tables, slot: Tensor, scores: Tensor) -> Tensor:
        """scores[B, V] of the next token of rows with slot[B] cached ones."""
        hidden = tables[self._name][:-1]
        if self._at is not None:
            hidden = (slot[:, None] == tables[f"{self._name} at"]) & hidden
        return scores.masked_fill(hidden, -INFINITY)

    def chosen(self, tables: Tables, slot: Tensor, tokens: Tensor) -> None:
        """After tokens[B] were chosen behind slot[B] cached ones."""


class ForcedIds(SuppressedIds):
    """Ids whose scores are 0, and those of all others -inf, at one length of the sequence."""

    def begin(self, tables: Tables, batch: Any, cached: int) -> None:
        """As of SuppressedIds. Raises IndexError for ids outside the vocabulary, as transformers does."""
        vocabulary = len(batch.ends) - 1
        for one in self._ids.tolist():
            if not -vocabulary <= one < vocabulary:
                raise IndexError(f"the forced id {one} is outside a vocabulary of {vocabulary}: ask for another one")
        self._ids = self._ids.remainder(vocabulary)  # -1 is the last one
        super().begin(tables, batch, cached)

    def scores(self, tables: Tables, slot: Tensor, scores: Tensor) -> Tensor:
        """As of SuppressedIds."""
        forced = torch.where(tables[self._name][:-1], 0.0, -INFINITY)
        return torch.where(slot[:, None] == tables[f"{self._name} at"], forced, scores)


class Timestamps:
    """Whisper's rules of timestamps (Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak
    Supervision").

    They come in pairs, but before the end; they never go back; the first token is one, and not too late; and where all
    of them together are more likely than any other token, one of them is next. The batch keeps what the rules need to
    know of a row: last[B] and previous[B], its tokens, and latest[B], its last timestamp, -1 for none.
    """

    alone = False
    _KEPT = ("last", "previous", "latest")

    def __init__(self, processor: WhisperTimeStampLogitsProcessor, begun: Tensor):
        self._first, self._not = processor.timestamp_begin, processor.no_timestamps_token_id
        self._end, self._initial = processor.eos_token_id, processor.max_initial_timestamp_index
        self._detect, self._at, self._begun = processor._detect_timestamp_from_logprob, processor.begin_index, begun

    @property
    def key(self) -> Any:
        """As of SuppressedIds."""
        return "timestamps", self._first, self._not, self._end, self._initial, self._detect

    def make(self, tables: Tables, batch: Any) -> None:
        """As of SuppressedIds."""
        if "timestamps at" not in tables:
            tables["timestamps at"] = torch.zeros_like(batch.pad)
            tables.update({name: torch.zeros_like(batch.tokens) for name in self._KEPT})

    def begin(self, tables: Tables, batch: Any, cached: int) -> None:
        """As of SuppressedIds. It does not wait for the device."""
        tables["timestamps at"].fill_(self._at + cached)
        said = self._begun[:, self._at :].to(batch.device)
        tables["last"].copy_(self._begun[:, -1])
        tables["previous"].copy_(self._begun[:, -2] if self._begun.shape[1] > 1 else self._begun[:, -1])
        tables["latest"].fill_(-1)
        if said.shape[1]:
            stamped = said >= self._first
            place = (torch.arange(1, said.shape[1] + 1, device=said.device) * stamped).amax(1, keepdim=True)
            found = said.gather(1, (place - 1).clamp(min=0))[:, 0]
            tables["latest"].copy_(torch.where(place[:, 0] > 0, found, -1))

    def scores(self, tables: Tables, slot: Tensor, scores: Tensor) -> Tensor:
        """As of SuppressedIds."""
        ids = torch.arange(scores.shape[1], device=scores.device)
        said = (slot - tables["timestamps at"])[:, None]
        last, previous, latest = (tables[name][:, None] for name in self._KEPT)
        one = (said >= 1) & (last >= self._first)
        two = (said < 2) | (previous >= self._first)
        stamps = ids >= self._first
        least = torch.where(latest < 0, self._first, torch.where(one & ~two, latest, latest + 1))
        hidden = (ids == self._not) | (one & two & stamps) | (one & ~two & (ids < self._end)) | (stamps & (ids < least))
        late = False if self._initial is None else ids > self._first + self._initial
        hidden = hidden | ((said == 0) & (~stamps | late))
        scores = scores.masked_fill(hidden, -INFINITY)
        if not self._detect:
            return scores
        likely = torch.nn.functional.log_softmax(scores.float(), dim=-1)
        stamp = likely[:, self._first :].logsumexp(dim=-1) > likely[:, : self._first].max(dim=-1).values
        return scores.masked_fill(stamp[:, None] & ~stamps, -INFINITY)

    def chosen(self, tables: Tables, slot: Tensor, tokens: Tensor) -> None:
        """As of SuppressedIds."""
        stamped = (tokens >= self._first) & (slot >= tables["timestamps at"])
        tables["previous"].copy_(tables["last"])
        tables["last"].copy_(tokens)
        tables["latest"].copy_(torch.where(stamped, tokens, tables["latest"]))


Part = SuppressedIds | Timestamps
CAPTURED = (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor, ForcedBOSTokenLogitsProcessor,
            ForcedEOSTokenLogitsProcessor, WhisperTimeStampLogitsProcessor)  # fmt: skip
WATCHING = (WhisperNoSpeechDetection,)  # they read the first scores, and change none


def watches_once(processor: WhisperNoSpeechDetection, begun: Tensor, unchanged: bool) -> bool:
    """Whether a processor has done all that it does once it was called with ids[B, L] and the first logits.

    unchanged: whether these are the scores that it would get. It reads them only where nothing but the first token of a
    transcript was given; else it calls the model itself.
    """
    return processor.begin_index <= begun.shape[1] and (unchanged or processor.start_of_trans_offset > 1)


def part_of(processor: Any, name: str, begun: Tensor | None) -> Part | None:
    """The part of a sampler that does what a processor does; None where the host must run it.

    name: of its tensors, another one for each part of a sampler. begun: ids[B, L] that are continued, where known.
    """
    kind = type(processor)
    if kind is SuppressTokensLogitsProcessor:
        return SuppressedIds(name, processor.suppress_tokens)
    if kind is SuppressTokensAtBeginLogitsProcessor:
        return SuppressedIds(name, processor.begin_suppress_tokens, processor.begin_index)
    if kind is ForcedBOSTokenLogitsProcessor:
        return ForcedIds(name, torch.as_tensor(processor.bos_token_id).reshape(-1), 1)
    if kind is ForcedEOSTokenLogitsProcessor:
        return ForcedIds(name, processor.eos_token_id.reshape(-1), processor.max_length - 1)
    if kind is WhisperTimeStampLogitsProcessor and begun is not None and type(processor.eos_token_id) is int:
        return Timestamps(processor, begun)
    return None


def mark(table: Tensor, ids: Tensor | None) -> None:
    """Set the entries of `table`[V + 1] for `ids`; ids outside the vocabulary go to the last entry."""
    table.fill_(False)
    if ids is not None:
        outside = table.shape[0] - 1
        ids = ids.reshape(-1).to(table.device)
        table.index_fill_(0, torch.where((ids >= 0) & (ids < outside), ids, outside), True)
