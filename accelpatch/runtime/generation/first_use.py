"""Runs a function on every transformers model at its first use, within a context.

Used is a model by `model(...)`, by its `forward`, `generate` or continuous batching, however they are called. Within
the context these methods of transformers' classes are wrapped, those of classes that are defined meanwhile too.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless
from transformers import PreTrainedModel

from accelpatch.errors import FOREIGN, AccelpatchError
from accelpatch.fusion.spread import is_offloaded
from accelpatch.runtime.generation.on_demand import wants_gradient

CALL = "__call__"
METHODS = ("forward", "generate", "init_continuous_batching")  # all ways into continuous batching lead through the last
OURS = "unpatched_class"  # an attribute of patched models' classes, which are made here
UNSEEN = "left as it is: no call of it as a whole was seen (torch.compile and DataParallel call it unseen)"


class _Meeting:
    """Calls `act` once for each model, before any of its parts are used on their own; later where it cannot be yet.

    Met are models for which it was called, and those inside them; ready, those of which `act` has ended; waiting, those
    that were called, but not so that `act` may follow.
    """

    def __init__(
        self, act: Callable[[nn.Module], None], on_left: Callable[[nn.Module, str], None] | None,
        whole: Callable[[nn.Module], None],
    ) -> None:  # fmt: skip
        self._act, self._on_left, self._whole = act, on_left, whole
        self._met, self._ready, self._waiting, self._made = (weakref.WeakSet[nn.Module]() for _ in range(4))
        self._lock = threading.RLock()
        self._over = False

    def meet(self, model: nn.Module, name: str, args: Any, kwargs: Any) -> None:
        """Call `act` if it is time. name: the method that is called, with its arguments."""
        if model in self._ready or self._over or "_is_replica" in vars(model):  # DataParallel's copies of a call
            return
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return
        with self._lock:  # other threads wait until the model is ready
            if model in self._met:
                return
            first, reason = model not in self._waiting, _why_later(model, name, args, kwargs)
            if reason is not None and not first:
                return
            parts = {part for part in model.modules() if isinstance(part, PreTrainedModel)}
            if first:
                self._run(self._whole, model)
            if reason is None:
                self._met.update(parts)
                self._run(self._act, model)
                self._ready.update(parts)
                return
            self._waiting.add(model)
            self._met.update(parts - {model})  # its parts are no models of their own from now on
            self._ready.update(parts - {model})
            self._leave(model, f"left as it is so far: {reason}")

    def _run(self, act: Callable[[nn.Module], None], model: nn.Module) -> None:
        try:
            act(model)
        except (AccelpatchError, Warning, *FOREIGN) as error:
            if self._on_left is None:
                raise
            self._leave(model, f"left as it is: {type(error).__name__}: {error}")

    def _leave(self, model: nn.Module, reason: str) -> None:
        if self._on_left is not None:
            self._on_left(model, reason)

    def made(self, model: nn.Module) -> None:
        """Note a model that was made."""
        self._made.add(model)

    def end(self) -> None:
        """Act no more, and say which models were never seen."""
        self._over = True
        unseen = [one for one in self._made if not any(p in self._met or p in self._waiting for p in one.modules())]
        inside = {id(part) for model in unseen for part in model.modules() if part is not model}
        for model in unseen:
            if id(model) not in inside:
                self._leave(model, UNSEEN)


def _why_later(model: nn.Module, name: str, args: Any, kwargs: Any) -> str | None:
    """Why a model cannot be patched before the call that begins now, but may be before another one; else None."""
    if model.training:
        return "it was called in training mode"
    here = [one for one in model.modules() if not is_offloaded(one)]
    if any(tensor.is_meta for one in here for tensor in one.parameters(recurse=False)):
        return "it was called on the meta device, without weights"
    if _with_other_weights():
        return "it was called by torch.func.functional_call, with other weights"
    if name in (CALL, "forward") and wants_gradient(type(model), args, kwargs):
        return "the script asked for a gradient"
    return None


def _with_other_weights() -> bool:
    """Whether a functional_call is running, which holds other tensors in some model until its end."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class _Wrappers:
    """The methods of transformers' classes while a context runs."""

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting
        self._set: list[tuple[type, str, Any, Any]] = []  # class, name, what it had there (None: nothing), what it has

    def begin(self) -> None:
        """Wrap the methods of all classes of models."""
        init, made = PreTrainedModel.__init__, self._meeting.made

        @functools.wraps(init)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            made(model)

        subclassed = vars(PreTrainedModel)["__init_subclass__"].__func__

        def __init_subclass__(cls: Any, **kwargs: Any) -> None:
            subclassed(cls, **kwargs)
            self.wrap(cls)

        for cls in _subclasses(PreTrainedModel):
            self.wrap(cls)
        self._put(PreTrainedModel, "__init__", __init__)
        self._put(PreTrainedModel, "__init_subclass__", classmethod(__init_subclass__))
        self._put(PreTrainedModel, CALL, _met(self._meeting, PreTrainedModel, CALL))

    def wrap(self, cls: Any) -> None:
        """Wrap what a class defines of METHODS, and what it inherits from classes that are no models."""
        if hasattr(cls, OURS):
            return
        for name in METHODS:
            owner = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
            if owner is cls or (owner is not nn.Module and not issubclass(owner, PreTrainedModel)):
                self._put(cls, name, _met(self._meeting, cls, name))

    def _put(self, cls: Any, name: str, value: Any) -> None:
        self._set.append((cls, name, vars(cls).get(name), value))
        setattr(cls, name, value)

    def end(self) -> None:
        """Put back what was there, but where others have put something in its place since."""
        for cls, name, before, value in reversed(self._set):
            if vars(cls).get(name) is value:
                delattr(cls, name) if before is None else setattr(cls, name, before)


def _subclasses(cls: Any) -> Iterator[Any]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _met(meeting: _Meeting, cls: Any, name: str) -> Any:
    """A method of a class, its own or one that it inherits, which meets the model first."""
    own = vars(cls).get(name)

    @functools.wraps(getattr(cls, name))
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            before = type(model)
            meeting.meet(model, name, args, kwargs)
            if type(model) is not before:  # patched just now, by this thread or by another one that was waited for
                return getattr(type(model), name)(model, *args, **kwargs)
        stock = getattr(super(cls, model), name) if own is None else functools.partial(own, model)
        return stock(*args, **kwargs)

    return method


@contextmanager
def on_first_use(
    act: Callable[[nn.Module], None], on_left: Callable[[nn.Module, str], None] | None = None,
    whole: Callable[[nn.Module], None] = lambda model: None,
) -> Iterator[None]:  # fmt: skip
    """Context manager: `act(model)` runs once for each outermost PreTrainedModel, before its first use.

    That is the first call in eval mode, with weights, that asks for no gradient. Calls of the model inside `act` run
    normally. on_left: called with the model and the reason in place of an exception that `act` raises, where `act` has
    to wait for another call, and at the end with models that are there, were made within the context and never called.
    whole: called with each outermost model at its first call of any kind, since models inside it may have been used
    before.
    transformers is restored at the end.
    """
    meeting = _Meeting(act, on_left, whole)
    wrappers = _Wrappers(meeting)
    try:
        wrappers.begin()
        yield
    finally:
        wrappers.end()
        meeting.end()
