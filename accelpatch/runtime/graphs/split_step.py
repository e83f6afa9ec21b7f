"""A step in parts: graphs of neighbouring fused layers on one device, and between them what a graph cannot hold.

That are layers whose modules run uncaptured (they have hooks, or their weights are offloaded: a graph would not call
the hooks), and the way from one device to the next: the hidden state is copied there. Each device has its own copy of
the batch's tokens, slot, positions and mask; the batch itself lies with the head, on the last device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.fused_layer import StepCall
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.spread import ByModule, is_offloaded
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.triton.launch import on_device
from accelpatch.runtime.graphs.capture import Graph, GraphOf


class _Uncaptured:
    """A part that runs its program as it is."""

    def __init__(self, program: Callable[[], None]):
        self.replay = program


class Lane:
    """What one device holds of a step: x[B, K], the hidden state between two parts, and the state of the batch."""

    def __init__(self, device: torch.device, step: Any, x: Tensor, home: bool):
        batch = step.batch
        self.device, self.home = device, home
        self.x = torch.zeros(x.shape, dtype=x.dtype, device=device)
        self.state = batch.state if home else torch.zeros_like(batch.state, device=device)
        self.tokens, self.slot, self.positions = batch.views(self.state)
        self.mask: Tensor = step.mask if home else torch.zeros_like(step.mask, device=device)

    def begin(self, state: Tensor) -> None:
        """Take the state of the batch, before a step. Earlier slots are in the mask already, and this step's is its
        own token's, which it sees whatever the mask says."""
        if not self.home:
            self.state.copy_(state, non_blocking=True)
            self.mask.scatter_(1, self.slot[:, None], 1)


class SplitStep:
    """The parts of a CapturedStep. watched: places of uncaptured layers, in order. graph_on: captures on a device."""

    def __init__(
        self, step: Any, fused: FusedModel, watched: Sequence[int], graph_on: Callable[[torch.device], GraphOf]
    ):
        self._step, self._fused, self._graph_on = weakref.ref(step), fused, graph_on  # weak: the step holds its parts
        spread, home = fused.spread, step.batch.device
        x = fused.embedded(step.batch.tokens, step.batch.positions)
        first, devices = (home, [home]) if spread is None else (spread.first, spread.devices)
        last = home if spread is None else spread.last
        self.lanes = {device: Lane(device, step, x, device == last) for device in devices}
        self._first, self._last = first, last
        self._parts = list(self._made(watched))

    def replay(self) -> None:
        """Run all parts once."""
        state = self.lanes[self._last].state
        for lane in self.lanes.values():
            lane.begin(state)
        for part in self._parts:
            part.replay()

    def masks(self) -> list[Tensor]:
        """The masks on the devices that the batch does not lie on."""
        return [lane.mask for lane in self.lanes.values() if not lane.home]

    def _made(self, watched: Sequence[int]) -> Iterator[Graph]:
        lane = self.lanes[self._first]
        waiting: list[int] = []  # places of the part to come
        begins = True  # which has the embedding too
        if is_offloaded(self._fused.embedding):
            yield _Uncaptured(partial(self._layers, lane, True, [], False))
            begins = False
        for place in range(len(self._fused.layers)):
            there = lane if self._fused.spread is None else self.lanes[self._fused.spread.layers[place]]
            if there is not lane or place in watched:
                if waiting or begins:
                    yield self._captured(lane, begins, waiting, False)
                waiting, begins = [], False
            if there is not lane:
                yield _Uncaptured(partial(_pass_on, lane, there))
                lane = there
            if place in watched:
                yield _Uncaptured(partial(self._module, lane, place))
            else:
                waiting.append(place)
        yield from self._end(lane, begins, waiting)

    def _end(self, lane: Lane, begins: bool, waiting: list[int]) -> Iterator[Graph]:
        """The parts from the last layers to the logits."""
        end, loose = self.lanes[self._last], isinstance(self._fused.head, ByModule)
        loose = loose or isinstance(self._fused.norm, ByModule)
        if lane is end and not loose:
            yield self._captured(lane, begins, waiting, True)
            return
        if waiting or begins:
            yield self._captured(lane, begins, waiting, False)
        if lane is not end:
            yield _Uncaptured(partial(_pass_on, lane, end))
        program = partial(self._layers, end, False, [], True)
        yield _Uncaptured(program) if loose else self._graph_on(end.device)(program)

    def _captured(self, lane: Lane, begins: bool, places: list[int], ends: bool) -> Graph:
        return self._graph_on(lane.device)(partial(self._layers, lane, begins, places, ends))

    @torch.no_grad()
    def _layers(self, lane: Lane, begins: bool, places: list[int], ends: bool) -> None:
        """The program of some layers. begins: from the tokens on. ends: to the logits."""
        fused, step = self._fused, self._step()
        assert step is not None
        with on_device(lane.x), weight_prefetch():  # nothing writes weights while steps are replayed
            if begins:
                x = fused.begin(lane.tokens, lane.positions)
            else:
                fused.sentinels.on(lane.device).reset(len(lane.x))
                x = lane.x.clone()  # a kernel between the reset and the first that writes there
            x, pending = fused.run(x, self._call(lane), places=places)
            if ends:
                step.end(fused.logits(x, pending))
            else:
                lane.x.copy_(x if pending is None else x + pending)

    def _call(self, lane: Lane) -> StepCall:
        step = self._step()
        assert step is not None
        return StepCall(self._fused.decoder(), step.cache, lane.positions, lane.slot, lane.mask)

    @torch.no_grad()
    def _module(self, lane: Lane, place: int) -> None:
        step = self._step()
        assert step is not None
        contents, call = step.over
        with on_device(lane.x), nullcontext() if contents is None else contents.module(place):
            call = self._call(lane) if call is None else call.on(lane.device)
            lane.x.copy_(call.by_module(lane.x, place))


def _pass_on(lane: Lane, there: Lane) -> None:
    """Copy the hidden state to another device; both devices' streams wait for it, the host does not."""
    there.x.copy_(lane.x, non_blocking=True)
