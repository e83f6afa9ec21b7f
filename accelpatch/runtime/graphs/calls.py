"""CUDA graphs for calls of models that do not generate (encoders, classifiers, embedders), one per repeated input
shape, and for the towers of models that see.

The captured program is the model's own forward over its replaced modules. Other shapes, and calls that cannot be
captured, run the modules uncaptured. A call with sizes of pictures, which the forward reads on the host, has a graph
for these sizes alone (constants.py).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.errors import FOREIGN, KernelError
from accelpatch.fusion.spread import device_of
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.models.multimodal import SIZES
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.constants import Constants
from accelpatch.runtime.graphs.masks import no_mask_of_ones, without_full_mask
from accelpatch.runtime.graphs.step import first_line

CALL = "captured call"
RUNS = 2  # runs by the modules before a call is captured
FAILURES = 3  # runs with an error, after which calls like it are left to the modules
AGAIN = 10  # further runs before an evicted call is captured again
MAX_CALLS = 16  # most captured calls per model
LARGEST = 1 << 28  # bytes of inputs and outputs: for larger calls launch overhead does not matter
COUNTED = 1024  # most calls whose runs are counted
TIMED = 3  # runs by which a graph is compared with the modules
GAIN = 0.95  # the most of the modules' time that a graph of a call may take
AS_FAST = "the modules are as fast"
RUNTIME = "_accelpatch_runtime"  # as in patched_model.py, which imports this
PLAIN = (bool, int, float, str, type(None))

Key = tuple[Any, ...]


def key_of(given: Mapping[str, Any], device: torch.device) -> Key | None:
    """A hashable key that is equal for calls that one graph can run; None for arguments that no graph can take.

    given: the call's arguments by name: tensors on `device`, and plain values. Of SIZES the values are part of the key.
    """
    found: list[tuple[Any, ...]] = []
    for name, value in sorted(given.items()):
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.device != device or value.requires_grad:
                return None
            values = tuple(value.flatten().tolist()) if name in SIZES else ()
            found.append((name, value.shape, value.dtype, values))
        elif type(value) in PLAIN:
            found.append((name, type(value), value))
        else:
            return None
    return tuple(found)


class CapturedCall:
    """The graph of one call, with its static inputs and outputs.

    Creating it runs the forward once uncaptured, which raises whatever is wrong with the caller's arguments.
    plain: whether the forward is Python that may run under a TorchFunctionMode, not a compiled one.
    """

    def __init__(self, forward: Callable[..., Any], given: Mapping[str, Any], plain: bool = True):
        self._forward = forward
        self._given = {name: one.clone() if isinstance(one, Tensor) else one for name, one in given.items()}
        sizes = [one for name, one in self._given.items() if name in SIZES and isinstance(one, Tensor)]
        self._constants = Constants(sizes) if sizes and plain else None
        run = partial(forward, **self._given)
        self._made: Any = run() if self._constants is None else self._constants.learn(run)

    def why_not(self) -> str | None:
        """Why a graph would not pay, or its outputs cannot be returned; None where it can be captured."""
        inputs = [one for one in self._given.values() if isinstance(one, Tensor)]
        try:
            size = sum(one.nbytes for one in (*inputs, *tensors_of(self._made)))
        except TypeError as error:
            return str(error)
        return f"{size} bytes in and out" if size > LARGEST else None

    def capture(self, graph: GraphOf) -> None:
        """Capture the graph; raises what the capture raises."""
        self._graph: Graph = graph(self._program)

    def _program(self) -> None:
        with weight_prefetch(), no_mask_of_ones(), self._constants or nullcontext():
            self._made = self._forward(**self._given)

    def same(self, other: CapturedCall) -> bool:
        """Whether the outputs of the uncaptured runs of two calls are equal to the bit."""
        ours, theirs = tensors_of(self._made), tensors_of(other._made)
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

    def pays(self, given: Mapping[str, Any]) -> bool:
        """Whether the graph is faster than the modules. It is not for large calls, during which the host is ahead of
        the GPU anyway. Only a GPU is asked."""
        device = next((one.device for one in given.values() if isinstance(one, Tensor) and one.is_cuda), None)
        if device is None:
            return True
        return _seconds(lambda: self(given), device) < GAIN * _seconds(lambda: self._forward(**given), device)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Run the graph on these arguments; returns copies of its outputs."""
        for name, one in self._given.items():
            if isinstance(one, Tensor):
                one.copy_(given[name])
        self._graph.replay()
        return copied(self._made)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The shortest time of a call until its GPU is done with it, after one to warm up."""
    found = []
    for _ in range(1 + TIMED):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def copied(made: Any) -> Any:
    """A copy of outputs with tensors of its own."""
    if isinstance(made, Tensor):
        return made.clone()
    if isinstance(made, dict):  # transformers' outputs are dictionaries
        return type(made)(**{name: copied(one) for name, one in made.items()})
    return type(made)(map(copied, made)) if type(made) in (tuple, list) else made


def tensors_of(made: Any) -> list[Tensor]:
    """All tensors in outputs. Raises TypeError for outputs other than tensors and plain values."""
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, dict) or type(made) in (tuple, list):
        return [one for part in (made.values() if isinstance(made, dict) else made) for one in tensors_of(part)]
    if type(made) in PLAIN:
        return []
    raise TypeError(f"{type(made).__name__} among the outputs")


class CapturedCalls:
    """The graphs of one model."""

    def __init__(self, model: nn.Module, graph: GraphOf):
        self._model, self._graph = weakref.ref(model), graph
        self._seen: Counter[Key] = Counter()
        self._graphs: OrderedDict[Key, CapturedCall] = OrderedDict()
        self._unfit: set[Key] = set()
        self._failed: Counter[Key] = Counter()
        self._masked: set[Key] = set()  # calls that a mask of ones changes
        self._known = own_code.why_not_in(model.modules()) is None  # which may have side effects

    def of(self, given: Mapping[str, Any], device: torch.device) -> tuple[CapturedCall, Mapping[str, Any]] | str | None:
        """The graph of a call and its arguments there, captured once the call has come often enough.

        None where the modules run it for now, or the reason why they must always.
        """
        bare = without_full_mask(given) if self._known else given
        key = key_of(bare, device) if self._known else None
        if key in self._masked:
            bare, key = given, key_of(given, device)
        if key is None or (key not in self._graphs and not self._worth(key)):
            return None
        if key not in self._graphs:
            reason = self._captured(key, bare, given)
            if key not in self._graphs:
                return reason
        self._graphs.move_to_end(key)
        return self._graphs[key], bare

    def _captured(self, key: Key, bare: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
        """Capture a call; returns why it is not. bare: its arguments without a mask that hides nothing."""
        first = self._run(given)
        if first is None:
            self._failed[key] += 1
            if self._failed[key] == FAILURES:
                self._unfit.add(key)
            return None
        reason = first.why_not()
        if reason is None and bare is not given:
            without = self._run(bare)
            if without is None or not without.same(first):
                self._masked.add(key)
                return None
            first = without
        try:
            if reason is None:
                first.capture(self._graph)
                reason = None if first.pays(bare) else AS_FAST
        except (*FOREIGN, KernelError) as error:  # a graph cannot hold it; the modules run the call
            reason = f"{type(error).__name__}: {first_line(error)}"
        if reason is not None:
            self._unfit.add(key)
            return reason
        self._graphs[key] = first
        if len(self._graphs) > MAX_CALLS:
            gone, _ = self._graphs.popitem(last=False)
            self._seen[gone] = -AGAIN
        return None

    def _run(self, given: Mapping[str, Any]) -> CapturedCall | None:
        """A call after its uncaptured run; None where that fails: the modules run it again, and raise it."""
        try:
            return CapturedCall(self._forward, given, self._compiled is None)
        except FOREIGN:
            return None

    def _worth(self, key: Key) -> bool:
        if key in self._unfit:
            return False
        if len(self._seen) + len(self._unfit) >= COUNTED:
            self._seen.clear()
            self._unfit.clear()
            self._failed.clear()
        self._seen[key] += 1
        return self._seen[key] > RUNS

    def _forward(self, **given: Any) -> Any:
        model: Any = self._model()
        compiled = self._compiled
        return model.unpatched_class.forward(model, **given) if compiled is None else compiled(**given)

    @property
    def _compiled(self) -> Any:
        """The model's compiled forward, or None."""
        return getattr(vars(self._model()).get(RUNTIME), "compiled", None)


def generates(model: Any) -> bool:
    """Whether a model is a language model with generate()."""
    return not hasattr(model, "can_generate") or bool(model.can_generate())


def captured_outputs(runtime: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """Outputs of one call by its graph; None where the modules must run."""
    if not is_eager() or wants_gradient(model.parameters()):
        return None
    if not runtime.lock.acquire(blocking=False):  # another thread is within a call
        return None
    try:
        calls = runtime.calls(model)
        if calls is None:
            return None
        with runtime.alone(), torch.inference_mode(False), torch.no_grad():
            found = calls.of(given, device_of(model))
            if isinstance(found, tuple):
                runtime.paths[CALL] += 1
                call, taken = found
                return call(taken)
            if found is not None:
                runtime.paths[f"no captured call: {found}"] += 1
            return None
    finally:
        runtime.lock.release()
