"""The device tensors that captured decode steps share: the state of a batch, and of draft tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.logits_processors import Tables, mark
from accelpatch.runtime.graphs.sampler import Sampler

SAMPLERS = 8  # captured samplers that a batch keeps
GraphOf = Callable[[Callable[[], None]], Graph]
DRAFTS = 7  # draft tokens per step; with the last token, a step of eight
TOKENS = DRAFTS + 1  # tokens of a step with draft tokens


class Batch:
    """The state of B sequences between decode steps, independent of the KV cache's capacity.

    tokens[B] int64: last token of each row. slot[B]: where the next one is cached. positions[B, 1]. state: the memory
    of these three. logits[B, V] float32. unfinished[B] bool. report[B + 1] int64: the new tokens, then whether any row
    goes on. ends, suppressed[V + 1] bool: ids that end a row, and ids suppressed while slot < suppressed_until[1].
    pad[1]: the token of finished rows. arrived[B] int32: counters that are zero between launches. tables: what logits
    processors read (logits_processors.py).
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        int64: Any = {"dtype": torch.int64, "device": device}
        self.rows, self.device = rows, device
        self.state = torch.zeros(3 * (rows + rows % 2), **int64)
        self.tokens, self.slot, self.positions = self.views(self.state)
        self.report = torch.zeros(rows + 1, **int64)
        self.suppressed_until, self.pad = (torch.zeros(1, **int64) for _ in range(2))
        self.logits = torch.zeros(rows, vocabulary, dtype=torch.float32, device=device)
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends, self.suppressed = (torch.zeros(vocabulary + 1, dtype=torch.bool, device=device) for _ in range(2))
        self.tables: Tables = {}
        self.drafts: Drafts | None = None  # set where the recipe asks for draft tokens
        self.model_drafts: Any = None  # model_drafts.ModelDrafts, made when a model drafts
        self._samplers: OrderedDict[Any, Graph] = OrderedDict()

    def views(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, slot and positions in a `state` of this size, each at a multiple of 16 bytes."""
        rows, room = self.rows, self.rows + self.rows % 2
        return state[:rows], state[2 * room : 2 * room + rows], state[room : room + rows].view(rows, 1)

    def begin(self, slot: int, positions: Tensor) -> None:
        """Set the state of rows with `slot` cached tokens each; positions[B, 1], or a shape that broadcasts to it."""
        self.slot.fill_(slot)
        self.positions.copy_(positions)

    def begin_sampling(self, sampler: Sampler, slot: int, pad: Tensor | None) -> None:
        """Set the tensors that the sampler reads, for rows with `slot` cached tokens. Does not wait for the device."""
        self.unfinished.fill_(True)
        self.suppressed_until.fill_(sampler.suppressed_until(slot))
        mark(self.ends, sampler.ends)
        mark(self.suppressed, sampler.suppressed)
        sampler.begin_tables(self, slot)
        if pad is not None:
            self.pad.copy_(pad.reshape(-1)[:1])

    def graph_of(self, sampler: Sampler, graph: GraphOf) -> Graph:
        """The captured program of a sampler over this batch. Capturing it leaves the batch's state as it was."""
        if sampler.key not in self._samplers:
            kept = [self.tokens.clone(), self.unfinished.clone()]
            sampler.make_tables(self)
            self._samplers[sampler.key] = graph(lambda: sampler.next_token(self))
            self.tokens.copy_(kept[0])
            self.unfinished.copy_(kept[1])
            while len(self._samplers) > SAMPLERS:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(sampler.key)
        return self._samplers[sampler.key]


class Drafts:
    """The state of a step of TOKENS tokens (the last token and DRAFTS draft tokens) of a one-row Batch.

    drafted[DRAFTS] int64, written by the host. logits[TOKENS, V] float32: after the last token and after each draft
    token. outcome[TOKENS + 2] int64: the token sampled at each place, how many of them are accepted, whether generation
    goes on. For the sampler this is a batch of TOKENS rows, whose report lies in the outcome.
    """

    def __init__(self, batch: Batch):
        int64: Any = {"dtype": torch.int64, "device": batch.device}
        self._last, self._slot, self._positions = batch.tokens, batch.slot, batch.positions
        self._logits = batch.logits
        self.drafted, self.tokens = torch.zeros(DRAFTS, **int64), torch.zeros(TOKENS, **int64)
        self.places = torch.arange(TOKENS, **int64)
        self.slot = torch.zeros(TOKENS, **int64)
        self.logits = batch.logits.new_zeros(TOKENS, batch.logits.shape[1])
        self.unfinished = torch.ones(TOKENS, dtype=torch.bool, device=batch.device)
        self.arrived = torch.zeros(TOKENS, dtype=torch.int32, device=batch.device)
        self.outcome = torch.zeros(TOKENS + 2, **int64)
        self.report = self.outcome[:-1]
        self.suppressed_until, self.pad = batch.suppressed_until, batch.pad
        self.ends, self.suppressed, self.tables = batch.ends, batch.suppressed, batch.tables
        self._sent = torch.zeros(DRAFTS, dtype=torch.int64, device="cpu", pin_memory=batch.device.type == "cuda")
        self._samplers: dict[Any, Graph] = {}

    def send(self, drafted: list[int]) -> None:
        """Queue the copy of DRAFTS tokens to the device; the previous step must have read its own."""
        self._sent.copy_(torch.tensor(drafted))
        self.drafted.copy_(self._sent, non_blocking=True)

    def sample(self, row: int) -> None:
        """Put the batch into the state after a one-token step whose logits are `row`'s."""
        self._logits.copy_(self.logits[row : row + 1])
        self._slot.add_(1)
        self._positions.add_(1)

    def graph_of(self, sampler: Sampler, graph: GraphOf) -> Graph:
        """The captured program of a sampler over all places. Capturing it leaves the batch's state as it was."""
        if sampler.key not in self._samplers:
            state = (self._last, self._slot, self._positions)
            kept = [tensor.clone() for tensor in state]
            self._samplers[sampler.key] = graph(lambda: self._choose(sampler))
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        return self._samplers[sampler.key]

    def _choose(self, sampler: Sampler) -> None:
        """The program: sample at every place, count the accepted tokens, and move the batch behind the last of them."""
        self.unfinished.fill_(True)
        self.slot.copy_(self._slot + self.places + 1)  # each row's, after its one-token step
        sampler.next_token(self)
        accepted = (self.drafted == self.tokens[:-1]) & self.unfinished[:-1]
        last = accepted.long().cumprod(0).sum(0, keepdim=True)
        self._last.copy_(self.tokens.index_select(0, last))
        self._slot.add_(last + 1)
        self._positions.add_(last + 1)
        self.outcome[TOKENS:].copy_(torch.cat([last + 1, self.unfinished.index_select(0, last).long()]))
