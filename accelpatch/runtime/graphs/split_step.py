"""A step in parts: graphs of neighbouring fused layers, and between them the layers whose modules run uncaptured.

Those are the layers with hooks: a graph would not call them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.captured_batch import GraphOf
from accelpatch.runtime.graphs.captured_graph import Graph


class _Uncaptured:
    """A part that runs its program as it is."""

    def __init__(self, program: Callable[[], None]):
        self.replay = program


class SplitStep:
    """The parts of a CapturedStep. watched: places of the layers that run uncaptured, in order."""

    def __init__(self, step: Any, fused: FusedModel, watched: Sequence[int], graph: GraphOf):
        self._step, self._fused = weakref.ref(step), fused  # weak: the step holds its parts
        self._x = torch.empty_like(fused.embedded(step.batch.tokens, step.batch.positions))  # between two parts
        self._parts = list(self._made(watched, graph))

    def replay(self) -> None:
        """Run all parts once."""
        for part in self._parts:
            part.replay()

    def _made(self, watched: Sequence[int], graph: GraphOf) -> Iterator[Graph]:
        first = 0
        for place in watched:
            if first == 0 or place > first:
                yield graph(partial(self._layers, first, place))
            yield _Uncaptured(partial(self._module, place))
            first = place + 1
        yield graph(partial(self._layers, first, None))

    def _layers(self, first: int, stop: int | None) -> None:
        """The program of the layers from `first` to `stop`, or to the logits."""
        fused, step = self._fused, self._step()
        assert step is not None
        with weight_prefetch():  # nothing writes weights while steps are replayed
            x = fused.begin(step.batch.tokens, step.batch.positions) if first == 0 else self._x
            x, pending = fused.run(x, step.call(), places=range(first, len(fused.layers) if stop is None else stop))
            logits = fused.logits(x, pending) if stop is None else None
        if logits is None:
            self._x.copy_(x if pending is None else x + pending)
        else:
            step.end(logits)

    @torch.no_grad()
    def _module(self, place: int) -> None:
        step = self._step()
        assert step is not None
        self._x.copy_(step.call().by_module(self._x, place))
