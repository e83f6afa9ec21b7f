"""A patched model that is unpatched on demand, when it is asked for something that only the original can do.

For scripts that do not know about the patch (`accelpatch exec`): they train, save, resize, pickle or count the model as
usual. Triggers: iterating over all parameters, a state dict, a gradient. What a call asks for is looked at once, where
it begins: what a model gives the models inside it is no request of the script.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.replacement import ON_DEMAND
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.generation.patched_model import positional, with_parts
from accelpatch.runtime.generation.weight_methods import REFUSED

# Code that looks at parameters for a model's device, dtype or size. A script's own, or a trainer's, wants them all.
LOOKING = ("torch.nn.modules.", "transformers.", "accelpatch.")
TRAINING = ("transformers.trainer", "transformers.optimization")
# The arguments of models that make a call compute a loss.
TARGETS = frozenset(
    {
        "labels", "start_positions", "end_positions", "next_sentence_label", "sentence_order_label", "class_labels",
        "mask_labels", "mc_labels", "return_loss",
    }
)  # fmt: skip


class _Running(threading.local):
    """The CodeWatches of the models whose forward runs in a thread."""

    def __init__(self) -> None:
        self.watches: list[Any] = []


_RUNNING = _Running()


class OnDemand:
    """Unpatches the model, once, when the patched model or one of its packed layers is asked for such a thing."""

    def __init__(self, model: Any, on_left: Callable[[nn.Module, str], None]):
        self.model, self._on_left = model, on_left
        self._handle, self._code = model.accelpatch, vars(model)[CODE]

    def __deepcopy__(self, memo: dict[int, Any]) -> OnDemand | None:
        """That of a copy of the whole model; None for one of a part alone, which is plain."""
        if id(self.model) not in memo:
            return None
        made = memo[id(self)] = OnDemand.__new__(OnDemand)
        made.model, made._on_left = memo[id(self.model)], self._on_left
        made._handle, made._code = copy.deepcopy(self._handle, memo), copy.deepcopy(self._code, memo)
        return made

    def __call__(self, asked: nn.Module, what: str) -> nn.Module:
        """Unpatch; returns the module now in the place of `asked`. what: the request, for the note to the user."""
        with self._code.alone():
            if ON_DEMAND in vars(self.model):  # no other thread was faster
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._handle.unpatch(forced=True)
                self._on_left(self.model, f"unpatched, since the script asked for {what}")
        return next((swap.old for swap in self._handle.swaps if swap.new is asked), asked)


def unpatch_on_demand(model: Any, on_left: Callable[[nn.Module, str], None]) -> None:
    """Let the model be unpatched on demand from now on; `on_left` is called with it and the reason."""
    handle, demand = model.accelpatch, OnDemand(model, on_left)
    for module in [one for one in model.modules() if isinstance(one, PackedWeight)]:
        handle.attach(module, ON_DEMAND, demand)
    for one in with_parts(model):
        handle.attach(one, ON_DEMAND, demand)
        handle.attach(one, "__class__", _class_on_demand(cast(Any, type(one))))


@functools.cache
def _class_on_demand(cls: Any) -> type[nn.Module]:
    """A subclass of a patched class with the same name, whose methods unpatch first."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    for name in ("state_dict", *REFUSED):
        if hasattr(cls, name):
            body[name] = _original_does(name, getattr(cls, name))
    looks = {name: _looked_at(name, getattr(cls, name)) for name in ("parameters", "named_parameters")}
    body |= looks | {"train": _trained(cls), "__reduce_ex__": _pickled(cls)}
    body |= {name: _differentiated(cls, name) for name in ("__call__", "forward")}
    return type(cls)(cls.__name__, (cls,), body)


def _original_does(name: str, stock: Any) -> Any:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _unpatched(self, name):
            return stock(self, *args, **kwargs)
        return getattr(self, name)(*args, **kwargs)

    return call


def _unpatched(self: Any, what: str) -> bool:
    """Unpatch the model for a request; False for another model of the class, made by `type(model)(...)`."""
    demand = vars(self).get(ON_DEMAND)
    if demand is not None:
        demand(self, what)
    return demand is not None


def _looked_at(name: str, stock: Any) -> Any:
    """`parameters` that unpatches when a second one is asked for: taking the first is how code finds the device."""

    @functools.wraps(stock)
    def look(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.startswith(LOOKING) and not caller.startswith(TRAINING):
            return iter(stock(self, *args, **kwargs))
        return _all_from_the_second_on(self, name, stock, args, kwargs)

    return look


def _all_from_the_second_on(self: Any, name: str, stock: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    first = next(iter(stock(self, *args, **kwargs)), None)
    if first is not None:
        yield first
    if ON_DEMAND in vars(self):
        vars(self)[ON_DEMAND](self, "its parameters")
    given = first[1] if isinstance(first, tuple) else first
    for one in getattr(self, name)(*args, **kwargs):
        if (one[1] if isinstance(one, tuple) else one) is not given:
            yield one


def _trained(cls: Any) -> Any:
    @functools.wraps(cls.train)
    def train(self: Any, mode: bool = True) -> Any:
        return self.train(mode) if mode and _unpatched(self, "training mode") else cls.train(self, mode)

    return train


def wants_gradient(cls: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of a model asks for a gradient: with labels, or with tensors that require one, outside no_grad."""
    if not torch.is_grad_enabled():
        return False
    given = dict(zip(positional(cls.forward), args, strict=False)) | kwargs
    if any(given.get(name) is not None and given[name] is not False for name in TARGETS):
        return True
    return any(isinstance(value, Tensor) and value.requires_grad for value in given.values())


def _differentiated(cls: Any, name: str) -> Any:
    """Wraps `forward`, and `__call__`, which may run a forward that was set on the instance.

    It unpatches first where the call asks for a gradient and is not one that the model itself makes in its forward.
    """

    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = vars(self).get(CODE)
        if code is None or torch.compiler.is_compiling():
            return getattr(cls, name)(self, *args, **kwargs)
        with code:  # from here on no other thread unpatches it
            running = _RUNNING.watches
            inner = any(one is code for one in running) or "_is_replica" in vars(self)  # DataParallel's copies stay
            if not inner and wants_gradient(cls, args, kwargs):
                _unpatched(self, "a gradient")
            if vars(self).get(CODE) is code:
                running.append(code)
                try:
                    return getattr(cls, name)(self, *args, **kwargs)
                finally:
                    running.pop()
        return getattr(self, name)(*args, **kwargs)

    return call


def _pickled(cls: Any) -> Any:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "copy":
            return cls.__reduce_ex__(self, protocol)
        if not _unpatched(self, "a pickle of it"):
            return cls.__reduce_ex__(self, protocol)
        return self.__reduce_ex__(protocol)

    return reduce_ex
