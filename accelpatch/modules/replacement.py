"""How a replacement takes over from an original: a subclass of its class, with its attributes, children and hooks."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar, cast

from torch import nn

Module = TypeVar("Module", bound=nn.Module)

# Copied, so that what is registered on one of the two modules is not seen by the other ...
_OWN_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# ... while hooks are shared: a handle taken before the swap still removes its hook, one added after survives it.


@functools.cache
def subclass(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """A class that behaves as `mixin` and is an instance of `cls`: hidden states and adapters find it by isinstance."""
    if issubclass(mixin, cls):
        return mixin
    return type(f"{mixin.__name__}_{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__})


def take_over(mixin: type[Module], original: nn.Module) -> Module:
    """A module of `subclass(mixin, type(original))` with all that `original` has, leaving `original` as it is.

    Parameters, buffers and children are shared, not copied. A hook of accelerate is carried over.
    """
    cls = subclass(mixin, type(original))  # type: ignore[arg-type]
    new = cls.__new__(cls)
    attributes = vars(original).copy()
    for table in _OWN_TABLES:
        attributes[table] = attributes[table].copy()
    new.__dict__.update(attributes)
    if "_hf_hook" in attributes:
        _rewrap_forward(new, attributes)
    return cast(Module, new)


def _rewrap_forward(new: nn.Module, attributes: dict[str, Any]) -> None:
    """accelerate puts a partial of its wrapper, bound to the module, on the instance: bind it to the new one."""
    wrapped = attributes["forward"]
    new.__dict__["_old_forward"] = types.MethodType(type(new).forward, new)
    new.__dict__["forward"] = functools.update_wrapper(functools.partial(wrapped.func, new), type(new).forward)
