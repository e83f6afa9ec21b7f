"""Which classes and modules run code that is not their own package's, as found at the last check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import chain
from operator import contains, is_
from typing import Any

from torch import nn

from accelpatch.own_code.packages import PACKAGES
from accelpatch.own_code.reached import BASE, FORWARD, Checks, Reached
from accelpatch.own_code.tensors import unusual_in

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTENTS = ("__getitem__", "__iter__", "__len__", "values")  # how a decoder finds the layers in its list
_LOCK = threading.RLock()
_REACHED: dict[tuple[type, tuple[str, ...], bool], Reached] = {}
_OTHERS: set[type] = set()  # classes whose code is not all their packages' own
_OVERRIDDEN: set[type] = set()  # classes of which an instance has a method of its own, or an unusual tensor
_LISTENERS: list[Callable[[], None]] = []


class Snapshot:
    """The code of all modules of a model, and of what `others` reach, when this was made."""

    def __init__(self, modules: Iterable[Any], others: Iterable[Reached] = ()):
        self._modules = list(modules)
        self._types = list(map(type, self._modules))
        reached = [reached_by(cls) for cls in dict.fromkeys(self._types)]
        self._checks = Checks([*reached, *others])
        inner = [(one, reached_by(type(one)).methods - {"forward"}) for one in self._modules]
        own = [(vars(one), name) for one, names in inner for name in names]
        self._instances, self._methods = [one for one, _ in own], [name for _, name in own]
        self._tables = [one._parameters for one in self._modules if hasattr(one, "_parameters")]
        self._last = self._parameters()
        self._kinds = list(map(_kind, self._last))

    def _parameters(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _other_kinds(self) -> bool:
        """Whether a parameter is of another class or layout; their buffers are replaced whenever a model moves."""
        parameters = self._parameters()
        if len(parameters) == len(self._last) and all(map(is_, parameters, self._last)):
            return False
        self._last = parameters
        return list(map(_kind, parameters)) != self._kinds

    def changed(self) -> bool:
        """Whether other code would run now: of a class or function, or by a module's class, method or tensors."""
        return (
            list(map(type, self._modules)) != self._types
            or self._other_kinds()
            or any(map(contains, self._instances, self._methods))
            or self._checks.changed()
        )


def _kind(tensor: Any) -> Any:
    return tensor if tensor is None else (type(tensor), tensor.layout)


def reached_by(cls: Any, roots: tuple[str, ...] = FORWARD, *, deep: bool = True) -> Reached:
    """The code that a class reaches at present."""
    with _LOCK:
        found = _REACHED.get((cls, roots, deep))
        if found is None or found.changed():
            more = CONTENTS if roots == FORWARD and issubclass(cls, CONTAINERS) else ()
            found = _REACHED[cls, roots, deep] = Reached(cls, (*roots, *more), deep=deep)
            if roots == FORWARD:
                (_OTHERS.add if found.reason else _OTHERS.discard)(cls)
        return found


def look_at(modules: Iterable[Any]) -> None:
    """Look at the classes of modules, for `is_others`."""
    for cls in set(map(type, modules)):
        reached_by(cls)


def why_not(module: Any) -> str | None:
    """Why a module would run others' code: of its class, on the instance, or of a tensor of its own; else None."""
    found, name, tensor = reached_by(type(module)), _own_method(module), unusual_in(module)
    if name is not None or tensor is not None:
        _OVERRIDDEN.add(type(module))
    own = f"{type(module).__name__} has a {name} of its own on the instance" if name else None
    return found.reason or own or tensor


def why_not_in(modules: Iterable[Any]) -> str | None:
    """The first reason of `why_not` among modules; None where there is none."""
    return next(filter(None, map(why_not, modules)), None)


def _own_method(module: Any) -> str | None:
    """The name of a method, besides `forward`, that is set on the instance; None for none."""
    methods = reached_by(type(module)).methods - {"forward"}
    return next((name for name in methods if name in vars(module)), None)


def is_others(cls: type) -> bool:
    """Whether a class was found to run code that is not its package's, at the last look."""
    return cls in _OTHERS


def differs(module: Any) -> bool:
    """Whether a module was found to run others' code: of its class, on the instance, or of a tensor of its own."""
    cls = type(module)
    return cls in _OTHERS or (
        cls in _OVERRIDDEN and (_own_method(module) is not None or unusual_in(module) is not None)
    )


def may_differ(cls: type) -> bool:
    """Whether `differs` may be true of an instance of a class."""
    return cls in _OTHERS or cls in _OVERRIDDEN


def has_overridden(cls: type) -> bool:
    """Whether an instance of a class was found to have a method of its own, besides `forward`, or an unusual tensor."""
    return cls in _OVERRIDDEN


def base_of(cls: type) -> type:
    """The class itself; of one that no package of PACKAGES defines, its first base that one does, but for nn.Module."""
    known = (base for base in cls.__mro__[:-1] if base.__module__.split(".")[0] in PACKAGES)
    base = next(known, cls)
    return cls if base.__module__ == BASE else base


def refresh() -> None:
    """Look at every known class again, and call the listeners."""
    with _LOCK:
        for cls, roots, deep in list(_REACHED):
            reached_by(cls, roots, deep=deep)
    for listener in _LISTENERS:
        listener()


def on_refresh(listener: Callable[[], None]) -> None:
    """Call a function at each `refresh` from now on."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)
