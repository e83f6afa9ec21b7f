"""A captured step over several tokens of one row that also outputs hidden states, for drafts made from these.

The model's fused layers run it where it has any, else its own modules over the same static cache. Keys and values of
rejected tokens stay in the slots after the batch's, where the next check overwrites them; the mask hides them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.fused_layer import StepCall
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.drafts import Drafts
from accelpatch.runtime.graphs.step import CapturedStep

STATES = "output_hidden_states"


class StatesCheck:
    """The program over the last token and `drafts`' draft tokens. wanted: indices of hidden states, as transformers
    counts them: 0 the embeddings, -1 the normalised ones after the last layer.

    states[i][1, T, K]: hidden state wanted[i] of each place, until it runs again. It does not advance the batch. Raises
    what the capture raises. The cache must have T free slots from the batch's slot on.
    """

    def __init__(self, step: CapturedStep, drafts: Drafts, wanted: Sequence[int], graph: GraphOf):
        self._step_ref = weakref.ref(step)  # weak, since the step has a reference to this
        self._drafts, self._wanted = drafts, tuple(wanted)
        self.states: list[Tensor] = []
        self.slots = torch.arange(step.capacity, device=step.batch.device)
        self.graph: Graph = graph(self._run)

    @property
    def _step(self) -> CapturedStep:
        step = self._step_ref()
        assert step is not None
        return step

    def _run(self) -> None:
        step, drafts = self._step, self._drafts
        slot, mask = step.batch.slot, step.mask
        mask.masked_fill_(self.slots >= slot, 0)
        mask.index_fill_(1, slot + drafts.places, 1)
        tokens, positions = torch.cat([step.batch.tokens, drafts.drafted])[None], step.batch.positions + drafts.places
        with weight_prefetch():
            logits, states = (self._by_modules if step.fused is None else self._fused)(tokens, positions)
        drafts.logits.copy_(logits)
        self.states = states

    def _fused(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        step = self._step
        fused = step.fused
        assert fused is not None
        seen: list[Tensor] = []
        call = StepCall(fused.decoder(), step.cache, positions, step.batch.slot, step.mask)
        rows, pending = fused.run(fused.begin(tokens, positions), call, (), seen)
        places = [place % (len(seen) + 1) for place in self._wanted]
        last = fused.normal(rows, pending) if len(seen) in places else rows
        states = [(last if place == len(seen) else seen[place])[None] for place in places]
        return fused.logits(rows, pending), states

    def _by_modules(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        step = self._step
        given = {"input_ids": tokens, "attention_mask": step.mask, "position_ids": positions, CACHE: step.cache}
        try:
            outputs: Any = step.model(**given, use_cache=True, return_dict=True, **{STATES: True})
        finally:
            for layer in step.cache.layers:
                layer.ahead = 0
        return outputs.logits[0], [outputs.hidden_states[place] for place in self._wanted]
