"""Calls of a model that does not generate (encoders, classifiers, embedders), as one graph for shapes that come again.

The program is the model's own forward over its replaced modules. Calls of other shapes, and those that no graph can
hold, run it as ever.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.operation import is_eager
from accelpatch.runtime.captured_batch import GraphOf
from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.captured_step import first_line

CALL = "captured call"
RUNS = 2  # by the modules, before a call is captured
AGAIN = 10  # more of them, before one that had to go is captured again
MAX_CALLS = 16  # captured calls of a model
LARGEST = 1 << 28  # bytes of what goes in and comes out: a larger call takes the device longer than the host anyway
COUNTED = 1024  # different calls that are remembered
PLAIN = (bool, int, float, str, type(None))
TRUSTED = ("transformers.", "torch.", "accelpatch.", "peft.")  # whose forwards have no effects but their outputs

Key = tuple[Any, ...]


def key_of(given: Mapping[str, Any], device: torch.device) -> Key | None:
    """What two calls have alike that one graph can run; None for arguments that none can.

    given: the call's arguments by name: tensors on `device`, and plain values.
    """
    found: list[tuple[Any, ...]] = []
    for name, value in sorted(given.items()):
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.device != device or value.requires_grad:
                return None
            found.append((name, value.shape, value.dtype))
        elif type(value) in PLAIN:
            found.append((name, type(value), value))
        else:
            return None
    return tuple(found)


class CapturedCall:
    """One call: its tensors, which stay where they are, and what comes out of them.

    Made by a run of the model's forward, which raises what the caller's arguments deserve.
    """

    def __init__(self, forward: Callable[..., Any], given: Mapping[str, Any]):
        self._forward = forward
        self._given = {name: one.clone() if isinstance(one, Tensor) else one for name, one in given.items()}
        self._made: Any = forward(**self._given)

    def why_not(self) -> str | None:
        """Why it is not worth a graph, or cannot be given back; None where it is."""
        inputs = [one for one in self._given.values() if isinstance(one, Tensor)]
        try:
            size = sum(one.nbytes for one in (*inputs, *tensors_of(self._made)))
        except TypeError as error:
            return str(error)
        return f"{size} bytes in and out" if size > LARGEST else None

    def capture(self, graph: GraphOf) -> None:
        """Make the graph; raises whatever the capture raises."""
        self._graph: Graph = graph(self._program)

    def _program(self) -> None:
        with weight_prefetch():
            self._made = self._forward(**self._given)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The outputs, in tensors of their own."""
        for name, one in self._given.items():
            if isinstance(one, Tensor):
                one.copy_(given[name])
        self._graph.replay()
        return copied(self._made)


def copied(made: Any) -> Any:
    """Outputs in tensors of their own."""
    if isinstance(made, Tensor):
        return made.clone()
    if isinstance(made, dict):  # transformers' outputs are dictionaries
        return type(made)(**{name: copied(one) for name, one in made.items()})
    return type(made)(map(copied, made)) if type(made) in (tuple, list) else made


def tensors_of(made: Any) -> list[Tensor]:
    """All tensors of outputs. Raises TypeError for outputs that are neither tensors nor plain values."""
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, dict) or type(made) in (tuple, list):
        return [one for part in (made.values() if isinstance(made, dict) else made) for one in tensors_of(part)]
    if type(made) in PLAIN:
        return []
    raise TypeError(f"{type(made).__name__} among the outputs")


def foreign(model: nn.Module) -> str | None:
    """The name of a module with a forward of the user's own, which may do more than compute; None for none."""
    forwards = ((name, type(module).forward.__module__) for name, module in model.named_modules())
    return next((name or "the model" for name, home in forwards if not f"{home}.".startswith(TRUSTED)), None)


class CapturedCalls:
    """Those of one model."""

    def __init__(self, model: nn.Module, graph: GraphOf):
        self._model, self._graph = weakref.ref(model), graph
        self._seen: Counter[Key] = Counter()
        self._held: OrderedDict[Key, CapturedCall] = OrderedDict()
        self._unfit: set[Key] = set()
        self._known = foreign(model) is None

    def of(self, given: Mapping[str, Any], device: torch.device) -> CapturedCall | str | None:
        """A call's graph, captured now where it comes often enough; None where its modules run it, or why they must."""
        key = key_of(given, device) if self._known else None
        if key is None or (key not in self._held and not self._worth(key)):
            return None
        if key not in self._held:
            try:
                call = CapturedCall(self._forward, given)
            except Exception:  # noqa: BLE001  the modules run it again, and raise it to the caller
                return None
            if reason := call.why_not():
                self._unfit.add(key)
                return reason
            try:
                call.capture(self._graph)
            except Exception as error:  # noqa: BLE001  a graph cannot hold it; the modules run the call
                self._unfit.add(key)
                return f"{type(error).__name__}: {first_line(error)}"
            self._hold(key, call)
        self._held.move_to_end(key)
        return self._held[key]

    def _hold(self, key: Key, call: CapturedCall) -> None:
        self._held[key] = call
        if len(self._held) > MAX_CALLS:
            gone, _ = self._held.popitem(last=False)
            self._seen[gone] = -AGAIN

    def _worth(self, key: Key) -> bool:
        if key in self._unfit:
            return False
        if len(self._seen) + len(self._unfit) >= COUNTED:
            self._seen.clear()
            self._unfit.clear()
        self._seen[key] += 1
        return self._seen[key] > RUNS

    def _forward(self, **given: Any) -> Any:
        model: Any = self._model()
        return model.unpatched_class.forward(model, **given)


def generates(model: Any) -> bool:
    """Whether a model's single calls are those of a language model."""
    return not hasattr(model, "can_generate") or bool(model.can_generate())


def captured_outputs(runtime: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """What a call of a model that does not generate gives by its graph; None where its modules run it."""
    if not is_eager() or (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())):
        return None
    if not runtime.lock.acquire(blocking=False):  # another thread is within a call
        return None
    try:
        calls = runtime.calls(model)
        if calls is None:
            return None
        with runtime.alone(), torch.inference_mode(False), torch.no_grad():
            call = calls.of(given, next(model.parameters()).device)
            if isinstance(call, CapturedCall):
                runtime.paths[CALL] += 1
                return call(given)
            if call is not None:
                runtime.paths[f"no captured call: {call}"] += 1
            return None
    finally:
        runtime.lock.release()
