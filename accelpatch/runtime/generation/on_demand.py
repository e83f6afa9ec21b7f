"""A patched model that is unpatched on demand, when it is asked for something that only the original can do.

For scripts that do not know about the patch (`accelpatch exec`): they train, save, resize, pickle or count the model as
usual. Triggers: iterating over all parameters, a state dict, a gradient.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.replacement import ON_DEMAND
from accelpatch.runtime.generation.patched_model import REFUSED, with_parts

# Code that looks at parameters for a model's device, dtype or size. A script's own, or a trainer's, wants them all.
LOOKING = ("torch.nn.modules.", "transformers.", "accelpatch.")
TRAINING = ("transformers.trainer", "transformers.optimization")


class OnDemand:
    """Unpatches the model, once, when the patched model or one of its packed layers is asked for such a thing."""

    def __init__(self, model: Any, on_left: Callable[[nn.Module, str], None]):
        self.model, self._on_left = model, on_left

    def __call__(self, asked: nn.Module, what: str) -> nn.Module:
        """Unpatch; returns the module now in the place of `asked`. what: the request, for the note to the user."""
        originals = {id(swap.new): swap.old for swap in self.model.accelpatch.swaps}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.accelpatch.unpatch(forced=True)
        self._on_left(self.model, f"unpatched, since the script asked for {what}")
        return originals.get(id(asked), asked)


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
    body |= looks | {"train": _trained(cls), "forward": _differentiated(cls), "__reduce_ex__": _pickled(cls)}
    return type(cls)(cls.__name__, (cls,), body)


def _original_does(name: str, stock: Any) -> Any:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[ON_DEMAND](self, name)
        return getattr(self, name)(*args, **kwargs)

    return call


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
        if mode:
            vars(self)[ON_DEMAND](self, "training mode")
        return self.train(mode) if mode else cls.train(self, mode)

    return train


def _differentiated(cls: Any) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wanted = kwargs.get("labels") is not None or any(tensor.requires_grad for tensor in tensors)
        if torch.is_grad_enabled() and wanted:
            vars(self)[ON_DEMAND](self, "a gradient")
            return self.forward(*args, **kwargs)
        return cls.forward(self, *args, **kwargs)

    return forward


def _pickled(cls: Any) -> Any:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "copy":
            return cls.__reduce_ex__(self, protocol)
        vars(self)[ON_DEMAND](self, "a pickle of it")
        return self.__reduce_ex__(protocol)

    return reduce_ex
