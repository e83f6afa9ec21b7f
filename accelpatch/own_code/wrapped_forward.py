"""A `forward` on an instance: accelerate's wrapper, which calls the forward that it found, or a user's own."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn


def rewrap_forward(new: nn.Module, wrapped: Any) -> None:
    """Rebind accelerate's wrapped forward, a partial bound to the original instance, to the new one."""
    bind_wrapped(new)
    new.__dict__["forward"] = functools.update_wrapper(functools.partial(wrapped.func, new), type(new).forward)


def bind_wrapped(module: nn.Module) -> None:
    """Let accelerate's wrapper around a module call its class's present forward."""
    module.__dict__["_old_forward"] = types.MethodType(type(module).forward, module)


def wraps_own_forward(module: nn.Module) -> bool:
    """Whether accelerate's wrapper around a module calls the forward of its class, and none that was set on it."""
    function = getattr(vars(module).get("_old_forward"), "__func__", None)
    return function is not None and function is getattr(type(module), "forward", None)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the user set a `forward` on the instance. accelerate's wrapper does not count: it moves with its hook."""
    own = vars(module).get("forward")
    left_behind = getattr(own, "__func__", None) is getattr(type(module), "forward", None)
    wrapped = hasattr(module, "_hf_hook") and wraps_own_forward(module)
    return own is not None and not left_behind and not wrapped
