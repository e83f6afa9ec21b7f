"""One decode step as two captured programs over tensors at fixed addresses: the model, and the sampler.

The model's program reads the last tokens, slot and positions from the device, runs the fused layers (fused_model.py) or
else the model's own forward over the static cache, and leaves float32 logits. The sampler's program turns them into the
next tokens, and into what the host reads of them. All these tensors are a Batch. Neither synchronises with the host.
They are two graphs, so that another temperature does not capture the model again.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from accelpatch.errors import KernelError
from accelpatch.fusion.cache_call import CacheCall
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cached import Cached
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.layouts.kv_states import FLOAT
from accelpatch.kernels.ops.step.step_end import end_step_
from accelpatch.runtime.cache_contents import Contents, attach, copy_slots
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.kv_cache import Lent, captured_layers
from accelpatch.runtime.graphs.logits_processors import Tables, mark
from accelpatch.runtime.graphs.sampler import Sampler
from accelpatch.runtime.graphs.split_step import SplitStep

CAPTURED = "captured step"  # in the report, with their number

# What a model raises when its forward cannot run over a static cache, or asks the host for a number while captured.
CAPTURE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, KernelError)

SAMPLERS = 8  # captured samplers that a batch keeps
GraphOn = Callable[[torch.device], GraphOf]


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
        self.drafts: Any = None  # drafts.Drafts, set where the recipe asks for draft tokens
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


class CapturedStep(Lent):
    """The model's step for `batch` over a static cache of one capacity. mask[B, capacity] int64: 1 where tokens are.

    fused: its fused layers; None where it runs the model's modules. watched: places of the layers that run their
    modules at every replay, since they have hooks, or their weights are offloaded. graph_on: captures programs on
    another device than the batch's, for layers on several. form: of the cache (kernels/layouts/kv_states.py).
    """

    shared = False  # whether its cache is another step's

    def __init__(
        self, model: nn.Module, batch: Batch, shapes: Sequence[Cached], capacity: int, graph: GraphOf,
        fused: FusedModel | None = None, watched: Sequence[int] = (), graph_on: GraphOn | None = None,
        form: str = FLOAT,
    ):  # fmt: skip
        self.batch, self.capacity, self.fused = batch, capacity, fused
        self.verification: Graph | None = None  # the step of several tokens; see drafts.py
        self.no_drafts = ""  # why there is no `verification`
        self.checks: dict[int, Graph] = {}  # steps of so many tokens, for the drafts of models
        self.states: dict[Any, Any] = {}  # the same with hidden states: states_check.StatesCheck
        self.drafting: dict[Any, Any] = {}  # of a draft model: its programs (draft_model.py)
        self.exits: dict[int, Any] = {}  # by the number of layers: draft_model.ExitStep
        self.cache = Cache(layers=captured_layers(shapes, batch.rows, capacity, batch.slot, form))
        self.mask = torch.zeros(batch.rows, capacity, dtype=torch.int64, device=batch.device)
        self.prompts: Any = None  # prefill.Prompts, made at the first prompt
        self.over: tuple[Contents | None, CacheCall | None] = None, None  # while it is replayed
        self._model = weakref.ref(model)  # weak: the model holds its runtime, which holds this step
        self._arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        if "logits_to_keep" in self._accepted:
            self._arguments["logits_to_keep"] = 1
        kept = [tensor.clone() for tensor in (batch.slot, batch.positions, batch.logits)]
        batch.slot.zero_()
        batch.positions.zero_()
        self._parts: SplitStep | None = None
        if fused is not None and (watched or fused.in_parts):
            self._parts = SplitStep(self, fused, watched, graph_on or (lambda device: graph))
            self._graph: Graph = self._parts
        else:
            self._graph = graph(self.advance)
        for tensor, before in zip((batch.slot, batch.positions, batch.logits), kept, strict=True):
            tensor.copy_(before)

    def advance(self) -> None:
        """The captured program: cache the batch's tokens, compute logits, and advance slot and positions by one."""
        batch = self.batch
        with weight_prefetch():  # nothing writes weights while steps are replayed
            if self.fused is not None:  # a new token attends to its own slot whatever the mask
                logits = self.fused(batch.tokens, batch.positions, batch.slot, self.mask, self.cache)
            else:
                self.mask.scatter_(1, batch.slot[:, None], 1)
                logits = self._by_modules()
        self.end(logits)

    def end(self, logits: Tensor) -> None:
        """The end of the program: from the logits of the model's dtype."""
        batch = self.batch
        end_step_(logits, batch.logits, batch.slot, batch.positions, self.mask)

    def _by_modules(self) -> Tensor:
        """Logits [B, V] by the model's own forward."""
        try:
            return self.by_modules(self._given())[:, -1]
        finally:
            for layer in self.cache.layers:
                layer.ahead = 0

    @property
    def model(self) -> Any:
        """The model whose step it is."""
        model = self._model()
        assert model is not None
        return model

    def by_modules(self, given: dict[str, Any]) -> Tensor:
        """Logits [B, T, V] by the model's own forward."""
        logits: Tensor = self.model(**given, **self._arguments).logits
        return logits

    def _given(self) -> dict[str, Any]:
        """The arguments of the model's own forward."""
        places = {"position_ids": self.batch.positions} if "position_ids" in self._accepted else {}
        given = {"input_ids": self.batch.tokens[:, None], "attention_mask": self.mask, CACHE: self.cache}
        return {**given, **places}

    def replay(self, contents: Contents | None = None, call: CacheCall | None = None) -> None:
        """Run the captured program once. contents: of the cache of `call`, which uncaptured layers' modules use."""
        self.over = contents, call
        try:
            self._graph.replay()
        finally:
            self.over = None, None

    def show(self, length: int, mask: Tensor | None) -> None:
        """Mark which of the first `length` slots hold tokens: all, or those where `mask`[B, length] is not 0."""
        self.mask.zero_()
        if mask is None:
            self.mask[:, :length] = 1
        else:
            self.mask[:, :length].copy_(mask.ne(0))
        self._copy_mask()

    def _copy_mask(self) -> None:
        for other in () if self._parts is None else self._parts.masks():
            other.copy_(self.mask)

    def attach(self, cache: Any) -> Contents:
        """Move one of transformers' caches into this step's, and leave it there until the step is used for another."""
        self.vacate()
        contents: Contents = attach(cache, self.cache)
        self._contents = weakref.ref(contents)
        return contents

    def adopt(self, smaller: CapturedStep) -> None:
        """Copy cache and mask from a step of smaller capacity; another's contents that lie there come with them."""
        self.vacate()
        copy_slots(smaller.cache, self.cache)
        self._contents, smaller._contents = smaller._contents, None
        if (contents := None if self._contents is None else self._contents()) is not None:
            contents.static = self.cache
        self.mask.zero_()
        self.mask[:, : smaller.capacity].copy_(smaller.mask)
        self._copy_mask()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for the report."""
    cause = error.__context__ or error  # ending a failed capture raises a second error
    return (str(cause).splitlines() or [""])[0]
