"""Several tokens of one sequence in one captured step: the last one and guesses of those after it.

The model's program computes the logits after each of them, as if all guesses were right: a row has the bits that a step
of its own would give it, since products and attention compute it alike among others and alone. Where the choice needs
the scores alone (greedy), a second program chooses a token for every row, finds how many guesses were right and moves
the batch on behind them. Keys and values of wrong guesses lie behind the batch's slot, where nothing reads them before
the next steps write over them.
"""

from __future__ import annotations

from typing import Any

import torch

from accelpatch.kernels.hip.binding import settled_weights
from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.captured_step import Batch, CapturedStep, GraphOf
from accelpatch.runtime.choice import Choice
from accelpatch.runtime.fused_layer import FusedModel
from accelpatch.runtime.prompt_lookup import GUESSES

TOKENS = GUESSES + 1  # of a step


class Guesses:
    """What a step of TOKENS reads and leaves beside its batch of one row, whatever the capacity of the cache.

    guessed[GUESSES] int64, written by the host; logits[TOKENS, V] float32: after the last token and after each guess.
    outcome[TOKENS + 2] int64: a token for each row, how many of them are the answer's, whether it goes on after them.
    To a choice it is a batch of TOKENS rows, with its report in the outcome.
    """

    def __init__(self, batch: Batch):
        whole = {"dtype": torch.int64, "device": batch.device}
        self._last, self._slot, self._positions = batch.tokens, batch.slot, batch.positions
        self._logits = batch.logits
        self.guessed, self.tokens = torch.zeros(GUESSES, **whole), torch.zeros(TOKENS, **whole)  # type: ignore[call-overload]
        self.places = torch.arange(TOKENS, **whole)  # type: ignore[call-overload]
        self.slot = torch.zeros(TOKENS, 1, **whole)  # type: ignore[call-overload]
        self.logits = torch.zeros(TOKENS, batch.logits.shape[1], device=batch.device)
        self.unfinished = torch.ones(TOKENS, dtype=torch.bool, device=batch.device)
        self.outcome = torch.zeros(TOKENS + 2, **whole)  # type: ignore[call-overload]
        self.report = self.outcome[:-1]
        self.held_until, self.ends, self.held, self.pad = batch.held_until, batch.ends, batch.held, batch.pad
        self._sent = torch.zeros(GUESSES, dtype=torch.int64, pin_memory=batch.device.type == "cuda")
        self._choices: dict[Any, Graph] = {}

    def send(self, guessed: list[int]) -> None:
        """Queue the copy of GUESSES tokens to the device; the last step's must have been read."""
        self._sent.copy_(torch.tensor(guessed))
        self.guessed.copy_(self._sent, non_blocking=True)

    def take(self, row: int) -> None:
        """Leave in the batch what a step of one token would have left: its logits, slot and position."""
        self._logits.copy_(self.logits[row : row + 1])
        self._slot.add_(1)
        self._positions.add_(1)

    def choice_of(self, choice: Choice, graph: GraphOf) -> Graph:
        """The captured program of `choice`; its capture leaves the state as it came."""
        if choice.key not in self._choices:
            state = (self._last, self._slot, self._positions)
            kept = [tensor.clone() for tensor in state]
            self._choices[choice.key] = graph(lambda: self._choose(choice))
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        return self._choices[choice.key]

    def _choose(self, choice: Choice) -> None:
        """The program: the outcome from the logits; the batch moves on to the last token that counts."""
        self.unfinished.fill_(True)
        self.slot.copy_((self._slot + self.places + 1)[:, None])  # each row's, after the step of one token that it is
        choice.next_token(self)
        right = (self.guessed == self.tokens[:-1]) & self.unfinished[:-1]
        last = right.long().cumprod(0).sum(0, keepdim=True)
        self._last.copy_(self.tokens.index_select(0, last))
        self._slot.add_(last + 1)
        self._positions.add_(last + 1)
        self.outcome[TOKENS:].copy_(torch.cat([last + 1, self.unfinished.index_select(0, last).long()]))


def verification(step: CapturedStep, guesses: Guesses, fused: FusedModel, graph: GraphOf) -> Graph:
    """The captured program of TOKENS tokens over the cache of `step`, which must hold nothing yet.

    It leaves the logits of all rows and does not move the batch on. Raises what a capture raises.
    """
    batch, mask, cache = step.batch, step.mask, step.cache
    kept = batch.slot.clone(), batch.positions.clone()
    batch.slot.zero_()
    batch.positions.zero_()

    def verify() -> None:
        mask.index_fill_(1, batch.slot + guesses.places, 1)
        tokens = torch.cat([batch.tokens, guesses.guessed])[None]
        with settled_weights():
            logits = fused(tokens, batch.positions + guesses.places, batch.slot, mask, cache)
        guesses.logits.copy_(logits)

    try:
        return graph(verify)
    finally:
        batch.slot.copy_(kept[0])
        batch.positions.copy_(kept[1])
