"""One layer's forward and backward pass as two graphs, for calls of one kind: a node of autograd that replays them.

forward:  y = layer(x, ...), of which nothing is kept but the arguments
backward: y = layer(x, ...) again, then the gradients of x and of the layer's parameters from that of y
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from accelpatch.errors import KernelError
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.watch import layouts_of

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a layer but for its tensors. leaves: the other arguments, each in its place."""

    function: Any
    own: tuple[Any, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: TreeSpec

    def __call__(self, tensors: list[Tensor]) -> Any:
        """What the layer returns for these tensors."""
        leaves = list(self.leaves)
        for place, one in zip(self.places, tensors, strict=True):
            leaves[place] = one
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*self.own, *args, **kwargs)

    def key(self, tensors: list[Tensor]) -> Any:
        """A hashable key that is equal for calls that one graph can run."""
        kinds = tuple((one.shape, one.dtype) for one in tensors)
        plain = tuple((type(one), one) for one in self.leaves)
        return str(self.spec), plain, self.places, kinds, tensors[0].requires_grad


def read(function: Any, args: tuple[Any, ...]) -> tuple[Call, list[Tensor]] | str:
    """A layer's call with its tensors, the hidden states first; or why it cannot be read."""
    if type(function) is not partial or not args or not isinstance(args[0], Tensor):
        return "no hidden states by position"
    leaves, spec = tree_flatten((args, function.keywords))
    places = tuple(place for place, one in enumerate(leaves) if isinstance(one, Tensor))
    plain = tuple(None if isinstance(one, Tensor) else one for one in leaves)
    other = next((one for one in plain if type(one) not in PLAIN), None)
    if other is not None:
        return f"an argument of type {type(other).__name__}"
    return Call(function.func, function.args, plain, places, spec), [leaves[place] for place in places]


class OneAtATime:
    """Context manager around what the graphs of one model do in their shared memory, whatever thread and stream asks: a
    backward pass may run in another thread than the forward pass."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stream: Any = None

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        with self._lock:
            if device.type == "cuda" and (stream := torch.cuda.current_stream(device)) != self._stream:
                if self._stream is not None:
                    stream.wait_stream(self._stream)
                self._stream = stream
            yield


class Static:
    """The tensors at fixed addresses that all layers have in common, since they run one after the other: arguments,
    the outputs and gradients of hidden states."""

    def __init__(self, tensors: list[Tensor], alone: OneAtATime):
        self.alone, self.device = alone, tensors[0].device
        self.given = [torch.empty_like(one, memory_format=torch.contiguous_format).detach() for one in tensors]
        self.of_x = torch.zeros_like(self.given[0])
        self.y: Tensor | None = None
        self.of_y: Tensor | None = None
        self._last: list[tuple[Any, int] | None] = [None] * len(tensors)

    @torch.no_grad()
    def fill(self, tensors: list[Tensor]) -> None:
        """Copy arguments here; what layers have in common (positions, a mask) is copied for the first of them."""
        self.given[0].copy_(tensors[0])
        for place, one in enumerate(tensors[1:], 1):
            last = self._last[place]
            if last is None or last[0]() is not one or last[1] != one._version:
                self.given[place].copy_(one)
                self._last[place] = weakref.ref(one), one._version


class CapturedLayer:
    """A layer's two graphs. reentrant: whether the forward pass runs without gradients, as checkpoint's does then."""

    def __init__(self, layer: nn.Module, call: Call, static: Static, tensors: list[Tensor], *, reentrant: bool):
        self._call, self.static, self._reentrant = call, static, reentrant
        self._wanted, self._first = tensors[0].requires_grad, tensors
        self.parameters = [one for one in layer.parameters() if one.requires_grad]
        number = {id(one): place for place, one in enumerate(self.parameters)}
        tables = [module._parameters for module in layer.modules()]
        self._places = [(table, name, number[id(one)]) for table in tables for name, one in table.items()
                        if id(one) in number]  # fmt: skip
        self._tensors = [*layer.parameters(), *layer.buffers()]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        # what a graph reads lives until the last backward pass, wherever the layer's own tensors are by then
        self._read = [one.detach() for one in self._tensors], layouts_of(layer, list(layer.modules()))
        self._found: list[Tensor | None] = []

    def capture(self, graph: GraphOf) -> None:
        """Run both passes once and capture them. Raises what the layer or the capture raises, and KernelError where the
        layer is random or does not return one tensor."""
        with self.static.alone(self.static.device):
            self.static.fill(self._first)
            self._first, device = [], self.static.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                before = _random_states(device)
                self._allocate()
                self._backward()
                if not all(map(torch.equal, before, _random_states(device))):
                    raise KernelError("random numbers in a layer")
            self._graphs: tuple[Graph, Graph] = graph(self._forward), graph(self._backward)

    def _allocate(self) -> None:
        y, static = self._output(), self.static
        if type(y) is not Tensor:
            raise KernelError("a layer returns something else than one tensor")
        if static.y is None:
            static.y, static.of_y = torch.empty_like(y).detach(), torch.zeros_like(y).detach()
        if (static.y.shape, static.y.dtype) != (y.shape, y.dtype):
            raise KernelError("layers with outputs of several shapes")

    @contextmanager
    def _in_graph(self) -> Iterator[list[Tensor]]:
        """Context manager: parameters are leaves of their own over the same memory, as torch's node of a parameter
        belongs to the stream of its first use, and a capture may not wait for that one."""
        leaves = [one.detach().requires_grad_() for one in self.parameters]
        for table, name, place in self._places:
            table[name] = leaves[place]  # type: ignore[assignment]
        try:
            yield leaves
        finally:
            for table, name, place in self._places:
                table[name] = self.parameters[place]

    def _arguments(self) -> list[Tensor]:
        return [self.static.given[0].detach().requires_grad_(self._wanted), *self.static.given[1:]]

    def _output(self) -> Any:
        with self._in_graph(), torch.set_grad_enabled(not self._reentrant):
            made = self._call(self._arguments())
        return made.detach() if isinstance(made, Tensor) else made

    def _forward(self) -> None:
        assert self.static.y is not None
        self.static.y.copy_(self._output())

    def _backward(self) -> None:
        with self._in_graph() as leaves, torch.enable_grad():
            given = self._arguments()
            y = self._call(given)
        asked = [given[0], *leaves] if self._wanted else leaves
        # gradients that come from one operation to the next are nothing that a capture must keep alive
        with torch.autograd.set_multithreading_enabled(False), torch._C.DisableTorchFunction():
            found: list[Any] = list(torch.autograd.grad(y, asked, self.static.of_y, allow_unused=True))
        if self._wanted:
            of_x = found.pop(0)
            self.static.of_x.zero_() if of_x is None else self.static.of_x.copy_(of_x)
        self._found = found

    def __call__(self, call: Call, tensors: list[Tensor]) -> Tensor:
        """The layer's output, with its node of autograd."""
        y: Tensor = _Layer.apply(self, call, len(tensors), *tensors, *self.parameters)
        return y

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The layer's output by a graph."""
        with self.static.alone(self.static.device):
            self.static.fill(tensors)
            self._graphs[0].replay()
            assert self.static.y is not None
            return self.static.y.clone()

    def backward(self, call: Call, tensors: list[Tensor], of_y: Tensor) -> list[Tensor | None]:
        """The gradients of the hidden states and of each parameter: by a graph, but for those that shall have gradients
        themselves, and where a tensor of the layer has moved since the forward pass."""
        if torch.is_grad_enabled() or list(map(Tensor.data_ptr, self._tensors)) != self._pointers:
            return self._uncaptured(call, tensors, of_y)
        with self.static.alone(self.static.device):
            self.static.fill(tensors)
            assert self.static.of_y is not None
            self.static.of_y.copy_(of_y)
            self._graphs[1].replay()
            found = [one for one in self._found if one is not None]
            copies = [torch.empty_like(one) for one in found]
            if found:
                torch._foreach_copy_(copies, found)
            rest = iter(copies)
            of_x = self.static.of_x.clone() if self._wanted else None
            return [of_x, *(None if one is None else next(rest) for one in self._found)]

    def _uncaptured(self, call: Call, tensors: list[Tensor], of_y: Tensor) -> list[Tensor | None]:
        further, x = torch.is_grad_enabled(), tensors[0]
        with torch.enable_grad():
            x = x if further else x.detach().requires_grad_(x.requires_grad)
            y = call([x, *tensors[1:]])
            asked = [one for one in (x, *self.parameters) if one.requires_grad]
            found = iter(torch.autograd.grad(y, asked, of_y, allow_unused=True, create_graph=further))
        return [next(found) if one.requires_grad else None for one in (x, *self.parameters)]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: CapturedLayer, call: Call, count: int, *tensors: Tensor) -> Tensor:
        ctx.layer, ctx.call, ctx.count = layer, call, count
        ctx.save_for_backward(*tensors[:count])
        return layer.forward(list(tensors[:count]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_x, *of_parameters = ctx.layer.backward(ctx.call, list(ctx.saved_tensors), gradients[0])
        return None, None, None, of_x, *([None] * (ctx.count - 1)), *of_parameters


def _random_states(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]
