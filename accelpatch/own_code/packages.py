"""Whether a function, or what stands in the place of one, is the code of a package in PACKAGES."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

from accelpatch.own_code.defined import codes_of, module_name

PACKAGES = frozenset({"torch", "transformers", "peft", "accelerate", "accelpatch", "contextlib"})
OURS = "accelpatch"
BUILT_IN = (BuiltinFunctionType, BuiltinMethodType, MethodDescriptorType)
# Descriptors and objects around one function -> the attribute that holds it.
AROUND: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    cached_property: "func",
    type(lru_cache(lambda: None)): "__wrapped__",
}
# Modules whose decorators run code that is not in the function (a caller's context manager), or change its numbers
# (autocast) -> the one inner function of theirs that a package's own functions may be.
DECORATORS = {"contextlib": "contextmanager.<locals>.helper", "torch.amp.autocast_mode": None}


def functions_of(value: Any) -> list[Any]:
    """The functions of a class attribute; [] for one that is no function."""
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset, value.fdel) if one is not None]
    if isinstance(value, (FunctionType, *BUILT_IN)):
        return [value]
    name = next((name for kind, name in AROUND.items() if isinstance(value, kind)), None)
    inner = None if name is None else getattr(value, name)
    return [inner] if isinstance(inner, FunctionType) else []


def layers_of(value: Any) -> list[Any]:
    """A function and all that it calls through its closure, as a decorator does; anything else alone."""
    seen: dict[int, Any] = {}
    _add_layers(value, seen)
    return list(seen.values())


def _add_layers(value: Any, seen: dict[int, Any]) -> None:
    value = next(iter(functions_of(value)), value)
    if id(value) in seen:
        return
    seen[id(value)] = value
    for inner in closure_of(value) if isinstance(value, FunctionType) else ():
        if isinstance(inner, MethodType):
            _add_layers(inner.__func__, seen)
            seen[id(inner.__self__)] = inner.__self__
        elif isinstance(inner, FunctionType) or (callable(inner) and not isinstance(inner, type)):
            _add_layers(inner, seen)


def closure_of(function: FunctionType) -> Iterator[Any]:
    """What the cells of a function's closure hold, but for those that are not filled yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def is_of_a_package(value: Any) -> bool:
    """Whether one of the PACKAGES defines a function where the function says, or an object's class."""
    if not isinstance(value, FunctionType):
        kind = value if isinstance(value, (type, *BUILT_IN)) else type(value)  # an object may say what it likes
        return _package(getattr(kind, "__module__", None) or "torch") in PACKAGES
    home, name = module_name(value), value.__code__.co_qualname
    if home in DECORATORS and "<locals>" in name and name != DECORATORS[home]:
        return False
    return _package(home) in PACKAGES and is_at(value, home, name)


def is_at(value: Any, module: str, name: str) -> bool:
    """Whether a function is one that a module defines under a qualified name; what torch compiled is taken for it."""
    if isinstance(value, FunctionType):
        return value.__code__ in codes_of(module).get(name, ())
    return not isinstance(value, BUILT_IN) and _package(type(value).__module__) == "torch"


def is_ours(value: Any) -> bool:
    """Whether a class attribute is a function of this package, but for decorators of other packages around it."""
    layers = [layer for one in functions_of(value) for layer in layers_of(one)]
    ours = (isinstance(one, FunctionType) and _package(module_name(one)) == OURS for one in layers)
    return all(map(is_of_a_package, layers)) and any(ours)


def _package(module: Any) -> str:
    return str(module).split(".")[0]
