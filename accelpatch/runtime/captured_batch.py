"""What captured programs read and leave on the device from step to step: a batch, and drafts of what follows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.prompt_lookup import DRAFTS
from accelpatch.runtime.sampler import Sampler

SAMPLERS = 8  # captured choices that a batch keeps
GraphOf = Callable[[Callable[[], None]], Graph]
TOKENS = DRAFTS + 1  # of a step


class Batch:
    """What a step of B rows hands on to the next, whatever the capacity of its cache.

    tokens[B] int64, the last one of each row; slot[1], where the next is cached; positions[B, 1]; logits[B, V] float32.
    unfinished[B] bool; report[B + 1] int64: the tokens, then whether any row goes on. ends, held[V + 1] bool: the ids
    that end a row, and those held back while slot < held_until[1]; pad[1]: what a finished row is given. arrived[B]
    int32: zeros between launches, which count in it.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        int64 = {"dtype": torch.int64, "device": device}
        self.rows, self.device = rows, device
        self.tokens, self.report = torch.zeros(rows, **int64), torch.zeros(rows + 1, **int64)  # type: ignore[call-overload]
        self.slot, self.suppressed_until, self.pad = (torch.zeros(1, **int64) for _ in range(3))  # type: ignore[call-overload]
        self.positions = torch.zeros(rows, 1, **int64)  # type: ignore[call-overload]
        self.logits = torch.zeros(rows, vocabulary, dtype=torch.float32, device=device)
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends, self.suppressed = (torch.zeros(vocabulary + 1, dtype=torch.bool, device=device) for _ in range(2))
        self.drafts: Drafts | None = None  # where the recipe wants some
        self._samplers: OrderedDict[Any, Graph] = OrderedDict()

    def begin(self, slot: int, positions: Tensor) -> None:
        """Set where rows stand that hold `slot` tokens each; positions[B, 1], or what spreads to it."""
        self.slot.fill_(slot)
        self.positions.copy_(positions)

    def begin_sampling(self, sampler: Sampler, slot: int, pad: Tensor | None) -> None:
        """Set what `choice` reads for rows that hold `slot` tokens. Nothing waits for the device."""
        self.unfinished.fill_(True)
        self.suppressed_until.fill_(sampler.suppressed_until(slot))
        _mark(self.ends, sampler.ends)
        _mark(self.suppressed, sampler.suppressed)
        if pad is not None:
            self.pad.copy_(pad.reshape(-1)[:1])

    def graph_of(self, sampler: Sampler, graph: GraphOf) -> Graph:
        """The captured program of `choice` over this batch; its capture leaves the state as it came."""
        if sampler.key not in self._samplers:
            kept = [self.tokens.clone(), self.unfinished.clone()]
            self._samplers[sampler.key] = graph(lambda: sampler.next_token(self))
            self.tokens.copy_(kept[0])
            self.unfinished.copy_(kept[1])
            while len(self._samplers) > SAMPLERS:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(sampler.key)
        return self._samplers[sampler.key]


def _mark(table: Tensor, ids: Tensor | None) -> None:
    """Set `table`[V + 1] at the ids of the vocabulary; its last entry takes those outside."""
    table.fill_(False)
    if ids is not None:
        outside = table.shape[0] - 1
        ids = ids.reshape(-1).to(table.device)
        table.index_fill_(0, torch.where((ids >= 0) & (ids < outside), ids, outside), True)


class Drafts:
    """What a step of TOKENS reads and leaves beside its batch of one row, whatever the capacity of the cache.

    drafted[DRAFTS] int64, written by the host; logits[TOKENS, V] float32: after the last token and after each draft.
    outcome[TOKENS + 2] int64: a token for each row, how many of them are the answer's, whether it goes on after them.
    To a choice it is a batch of TOKENS rows, with its report in the outcome.
    """

    def __init__(self, batch: Batch):
        int64 = {"dtype": torch.int64, "device": batch.device}
        self._last, self._slot, self._positions = batch.tokens, batch.slot, batch.positions
        self._logits = batch.logits
        self.drafted, self.tokens = torch.zeros(DRAFTS, **int64), torch.zeros(TOKENS, **int64)  # type: ignore[call-overload]
        self.places = torch.arange(TOKENS, **int64)  # type: ignore[call-overload]
        self.slot = torch.zeros(TOKENS, 1, **int64)  # type: ignore[call-overload]
        self.logits = batch.logits.new_zeros(TOKENS, batch.logits.shape[1])
        self.unfinished = torch.ones(TOKENS, dtype=torch.bool, device=batch.device)
        self.arrived = torch.zeros(TOKENS, dtype=torch.int32, device=batch.device)
        self.outcome = torch.zeros(TOKENS + 2, **int64)  # type: ignore[call-overload]
        self.report = self.outcome[:-1]
        self.suppressed_until, self.ends, self.suppressed, self.pad = (
            batch.suppressed_until,
            batch.ends,
            batch.suppressed,
            batch.pad,
        )
        self._sent = torch.zeros(DRAFTS, dtype=torch.int64, device="cpu", pin_memory=batch.device.type == "cuda")
        self._samplers: dict[Any, Graph] = {}

    def send(self, drafted: list[int]) -> None:
        """Queue the copy of DRAFTS tokens to the device; the last step's must have been read."""
        self._sent.copy_(torch.tensor(drafted))
        self.drafted.copy_(self._sent, non_blocking=True)

    def sample(self, row: int) -> None:
        """Leave in the batch what a step of one token would have left: its logits, slot and position."""
        self._logits.copy_(self.logits[row : row + 1])
        self._slot.add_(1)
        self._positions.add_(1)

    def graph_of(self, sampler: Sampler, graph: GraphOf) -> Graph:
        """The captured program of `choice`; its capture leaves the state as it came."""
        if sampler.key not in self._samplers:
            state = (self._last, self._slot, self._positions)
            kept = [tensor.clone() for tensor in state]
            self._samplers[sampler.key] = graph(lambda: self._choose(sampler))
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        return self._samplers[sampler.key]

    def _choose(self, sampler: Sampler) -> None:
        """The program: the outcome from the logits; the batch moves on to the last token that counts."""
        self.unfinished.fill_(True)
        self.slot.copy_((self._slot + self.places + 1)[:, None])  # each row's, after the step of one token that it is
        sampler.next_token(self)
        accepted = (self.drafted == self.tokens[:-1]) & self.unfinished[:-1]
        last = accepted.long().cumprod(0).sum(0, keepdim=True)
        self._last.copy_(self.tokens.index_select(0, last))
        self._slot.add_(last + 1)
        self._positions.add_(last + 1)
        self.outcome[TOKENS:].copy_(torch.cat([last + 1, self.unfinished.index_select(0, last).long()]))
