"""What a class's methods reach, read off their code, and whether all of it is the code of its package."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from accelpatch.own_code.defined import SELF, codes_of, dotted_names, home_of, module_name, origin_of
from accelpatch.own_code.packages import (
    BUILT_IN,
    OURS,
    PACKAGES,
    closure_of,
    functions_of,
    is_at,
    is_of_a_package,
    is_ours,
    layers_of,
)

READ_FURTHER = ("transformers.", "peft.")  # packages whose functions are read for what they reach in their turn
NOT_READ = "transformers.utils."  # reports, versions and documentation: nothing of it is computed by a fast path
KEYS = ("eager", "sdpa", "batched_mm", "grouped_mm")  # the entries of registries that fast paths stand for
TABLES = ("_global_mapping", "_local_mapping")  # of a registry: those of its class and of the object
FORWARD = ("forward",)
CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
BASE = "torch.nn.modules.module"  # the module of nn.Module


class Reached:
    """What a class's functions reach, read when made. reason: why it is not all its packages' own, or None.

    Of a patched model's or a replacement's class it is what the original reaches; and what others put into that class,
    or into one that they derived from it, is not the package's own.

    roots: names of the methods to begin with. deep: whether these are read for what they reach in their turn. methods:
    names of functions that its code calls through `self`. in_registry: whether a registry is not its package's.
    """

    def __init__(self, cls: type, roots: Iterable[str] = FORWARD, *, deep: bool = True):
        self.cls, self._deep = original_of(cls), deep
        self._in_front = [one for one in cls.__mro__ if one not in self.cls.__mro__]  # where names are found first
        self.reason: str | None = None
        self.in_registry = False
        self.methods: set[str] = set()
        self._names: set[str] = set()  # read through `self`
        self.places: dict[tuple[int, str], Mapping[str, Any]] = {}  # (id of an owner, name) -> its attributes
        self.registries: list[Mapping[str, Any]] = []
        self.functions: dict[int, FunctionType] = {}
        self.classes = [
            *self._in_front,
            *(base for base in self.cls.__mro__ if base.__module__ not in (BASE, "builtins")),
        ]
        for name in (*CALL, *roots):
            self._method(name)
        self._checks = Checks([self])

    def changed(self) -> bool:
        """Whether anything of it is another object than it was."""
        return self._checks.changed()

    def holds(self, function: FunctionType) -> bool:
        """Whether a function is defined in the module of the class or of one of its bases."""
        return any(function.__module__ == base.__module__ for base in self.classes)

    def _fault(self, what: str, found: Any) -> None:
        if self.reason is None:
            code = getattr(found, "__code__", None)  # a wrapper bears the name of what it wraps
            name = getattr(code, "co_qualname", None) or getattr(found, "__qualname__", type(found).__qualname__)
            home = module_name(found) if isinstance(found, FunctionType) else getattr(found, "__module__", None)
            self.reason = f"{what} is {name} of {home}, not the code of its package"

    def _method(self, name: str) -> None:
        """Read a name of the class, in itself and in the bases behind it, which it may call by `super`."""
        self._names.add(name)
        for made in (one for one in self._in_front if name in vars(one)):
            value = vars(made)[name]
            self.places[id(made), name] = vars(made)
            if not is_ours(value) and (functions_of(value) or made.__module__.split(".")[0] != OURS):
                self._fault(f"{made.__name__}.{name}", value)
        found = [base for base in self.cls.__mro__ if name in vars(base) and base.__module__ != "builtins"]
        for base in found:
            behind = base is not found[0] and base.__module__ == BASE  # the forward that nn.Module does not have
            if not behind:
                self._method_of(base, name)

    def _method_of(self, base: type, name: str) -> None:
        value = vars(base)[name]
        functions = functions_of(value)
        if functions and name not in CALL and not isinstance(value, property):
            self.methods.add(name)
        self.places[id(base), name] = vars(base)
        expected = (base.__module__, f"{base.__qualname__}.{name}")
        defined = expected[1] in codes_of(base.__module__)
        attribute = not hasattr(value, "__get__") and (isinstance(value, type) or not callable(value))
        if not functions and (defined or not attribute):
            self._fault(f"{base.__name__}.{name}", value)
        due = expected if defined and base.__module__ != BASE else None  # torch.fx traces by a __call__ of its own
        for function in functions:
            self._function(function, f"{base.__name__}.{name}", due, method=True)

    def _function(self, value: Any, what: str, expected: tuple[str, str] | None, *, method: bool = False) -> None:
        """Check a function, and read what it reaches. expected: (module, qualified name) of its code."""
        layers = layers_of(value)
        functions = {id(one): one for one in layers if isinstance(one, FunctionType)}
        foreign = next((one for one in layers if not is_of_a_package(one)), None)
        if foreign is not None or (expected and not any(is_at(one, *expected) for one in layers)):
            self._fault(what, value if foreign is None else foreign)
            self.functions |= functions
            return
        for key, one in functions.items():
            if key in self.functions:
                continue
            self.functions[key] = one
            home = module_name(one)
            further = f"{home}.".startswith(READ_FURTHER) and not home.startswith(NOT_READ)
            if self._deep and (further or (method and any(home == base.__module__ for base in self.classes))):
                self._read(one, method)

    def _read(self, function: FunctionType, method: bool) -> None:
        for value in closure_of(function):
            self._registry(value)
        for first, *rest in dotted_names(function.__code__):
            if first != SELF:
                self._global(function.__globals__, (first, *rest))
            elif method and rest and rest[0] not in self._names and not rest[0].startswith("__"):
                self._method(rest[0])

    def _global(self, namespace: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Read a dotted name in a function's globals: a function of its module, of another one, or of torch."""
        name, home = chain[0], str(namespace.get("__name__"))
        value = namespace.get(name)
        if _is_registry(value):
            self.places[id(namespace), name] = namespace
            self._registry(value)
            module, own = origin_of(home, name)
            if vars(sys.modules.get(module, sys)).get(own, value) is not value:
                self.in_registry = True
                self._fault(f"{home.rpartition('.')[2]}.{name}", value)
            return
        owner: Any = None
        for part in chain[1:]:
            if not (isinstance(value, ModuleType) and value.__name__.split(".")[0] == "torch"):
                break
            owner, name, value = value, part, vars(value).get(part)
        if owner is not None:
            self._of_torch(owner, name, value)
            return
        expected = home_of(home, name)
        if expected is not None and (expected[0].startswith(NOT_READ) or expected[0].split(".")[0] not in PACKAGES):
            return
        if name in namespace and (expected is not None or isinstance(value, FunctionType)):
            self.places[id(namespace), name] = namespace
            self._function(value, f"{home.rpartition('.')[2]}.{name}", expected)

    def _of_torch(self, owner: ModuleType, name: str, value: Any) -> None:
        if name not in vars(owner) or isinstance(value, ModuleType):
            return
        self.places[id(owner), name] = vars(owner)
        if isinstance(value, (FunctionType, *BUILT_IN)):
            self._function(value, f"{owner.__name__}.{name}", None)
        # has it the name under which it was found, but for underscores and its folder's name?
        own = str(getattr(value, "__name__", name)).replace("_", "")
        named = own.endswith(name.replace("_", "")) or not isinstance(value, (FunctionType, *BUILT_IN))
        if not named or (callable(value) and not is_of_a_package(value)):
            self._fault(f"{owner.__name__}.{name}", value)

    def _registry(self, value: Any) -> None:
        """Read one of transformers' interfaces: its entries, those of the class and those of the object, and how its
        class finds them."""
        if not _is_registry(value) or any(vars(value) is one for one in self.registries):
            return
        faults, self.reason = self.reason, None
        tables = [getattr(value, name) for name in TABLES]
        self.registries += [vars(value), *tables]
        kind = type(value).__name__
        for table in tables:
            for key in filter(table.__contains__, KEYS):
                self.places[id(table), key] = table
                self._function(table[key], f"{kind}[{key!r}]", None, method=_takes_self(table[key]))
                if not getattr(table[key], "__name__", "").startswith(key):
                    self._fault(f"{kind}[{key!r}]", table[key])
        for base in type(value).__mro__:
            if base.__module__.split(".")[0] != "collections" and base is not object:
                for name in [name for name, one in vars(base).items() if functions_of(one) and name != "__init__"]:
                    self.places[id(base), name] = vars(base)
                    self._function(vars(base)[name], f"{kind}.{name}", (base.__module__, f"{base.__qualname__}.{name}"))
        for name in vars(value).keys() - set(TABLES):
            self._fault(f"{kind}.{name}", vars(value)[name])
        self.in_registry, self.reason = self.in_registry or self.reason is not None, faults or self.reason


class Checks:
    """All that several classes reach, as lists that are compared in C."""

    def __init__(self, reached: Iterable[Reached]):
        every = list(reached)
        owners: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        for one in every:
            for (owner, name), table in one.places.items():
                owners.setdefault(owner, (table, []))[1].append(name)
        self._places = [(itemgetter(*dict.fromkeys(names)), table) for table, names in owners.values()]
        self._values = [read(table) for read, table in self._places]
        written = {key: one for each in every for key, one in each.functions.items() if each.holds(one)}
        self._functions = list(written.values())
        self._codes: list[CodeType] = list(map(_code, self._functions))
        bases = [vars(base) for base in dict.fromkeys(base for one in every for base in one.classes)]
        self._tables = [*bases, *{id(table): table for one in every for table in one.registries}.values()]
        self._sizes = list(map(len, self._tables))

    def changed(self) -> bool:
        """Whether a function, its code, an entry of a registry, or what attributes a class has is another."""
        try:
            return not (
                [read(table) for read, table in self._places] == self._values
                and all(map(is_, map(_code, self._functions), self._codes))
                and list(map(len, self._tables)) == self._sizes
            )
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError):  # it is gone, or compares to nothing
            return True


_code = attrgetter("__code__")


def original_of(cls: Any) -> type:
    """The class in whose place a class that this package made stands; of any other, the class itself."""
    made = getattr(cls, "unpatched_class", cls)
    return getattr(made, "replaced_class", made)


def _is_registry(value: Any) -> bool:
    return not isinstance(value, type) and all(type(getattr(value, name, None)) is dict for name in TABLES)


def _takes_self(value: Any) -> bool:
    """Whether the first argument of a function is a module that it calls `self`."""
    return isinstance(value, FunctionType) and value.__code__.co_varnames[:1] == (SELF,)
