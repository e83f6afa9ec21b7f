"""What a class's methods reach, read off their code, and whether all of it is the code of its package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from accelpatch.own_code.defined import SELF, codes_of, dotted_names, home_of, module_name

PACKAGES = frozenset({"torch", "transformers", "peft", "accelerate", "accelpatch", "contextlib"})
READ_FURTHER = ("transformers.", "peft.")  # packages whose functions are read for what they reach in their turn
NOT_READ = "transformers.utils."  # reports, versions and documentation: nothing of it is computed by a fast path
KEYS = ("eager", "sdpa", "batched_mm", "grouped_mm")  # the entries of registries that fast paths stand for
FORWARD = ("forward",)
CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
BASE = "torch.nn.modules.module"  # the module of nn.Module
# Descriptors around one function -> the attribute that holds it.
AROUND: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    cached_property: "func",
    type(lru_cache(lambda: None)): "__wrapped__",
}
BUILT_IN = (BuiltinFunctionType, BuiltinMethodType, MethodDescriptorType)


class Reached:
    """What a class's functions reach, read when made. reason: why it is not all its packages' own, or None.

    roots: names of the methods to begin with. deep: whether these are read for what they reach in their turn. methods:
    names of functions that its code calls through `self`.
    """

    def __init__(self, cls: type, roots: Iterable[str] = FORWARD, *, deep: bool = True):
        self.cls, self._deep = cls, deep
        self.reason: str | None = None
        self.methods: set[str] = set()
        self._names: set[str] = set()  # read through `self`
        self.places: dict[tuple[int, str], Mapping[str, Any]] = {}  # (id of an owner, name) -> its attributes
        self.registries: list[Mapping[str, Any]] = []
        self.functions: dict[int, FunctionType] = {}
        self.classes = [base for base in cls.__mro__[:-1] if base.__module__ != BASE]
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
            name, home = getattr(found, "__qualname__", type(found).__qualname__), getattr(found, "__module__", None)
            self.reason = f"{what} is {name} of {home}, not the code of its package"

    def _method(self, name: str) -> None:
        """Read a name of the class, in itself and in the bases behind it, which it may call by `super`."""
        self._names.add(name)
        found = [base for base in self.cls.__mro__[:-1] if name in vars(base)]
        for base in found:
            behind = base is not found[0] and base.__module__ == BASE  # the forward that nn.Module does not have
            if behind:
                continue
            value = vars(base)[name]
            functions = _functions(value)
            if functions and name not in CALL and not isinstance(value, property):
                self.methods.add(name)
            self.places[id(base), name] = vars(base)
            expected = (base.__module__, f"{base.__qualname__}.{name}")
            defined = expected[1] in codes_of(base.__module__)
            attribute = not hasattr(value, "__get__") and (isinstance(value, type) or not callable(value))
            if not functions and (defined or not attribute):
                self._fault(f"{base.__name__}.{name}", value)
            for function in functions:
                self._function(function, f"{base.__name__}.{name}", expected if defined else None, method=True)

    def _function(self, value: Any, what: str, expected: tuple[str, str] | None, *, method: bool = False) -> None:
        """Check a function, and read what it reaches. expected: (module, qualified name) of its code."""
        layers = [value] if not isinstance(value, FunctionType) else list(_layers(value))
        if not all(map(_of_a_package, layers)) or (expected and not any(_is_at(one, *expected) for one in layers)):
            self._fault(what, value)
            self.functions |= {id(one): one for one in layers if isinstance(one, FunctionType)}
            return
        for one in layers:
            if id(one) in self.functions or not isinstance(one, FunctionType):
                continue
            self.functions[id(one)] = one
            home = module_name(one)
            in_base = home == BASE
            if not self._deep:
                continue
            if (method and not in_base) or (f"{home}.".startswith(READ_FURTHER) and not home.startswith(NOT_READ)):
                self._read(one, method)

    def _read(self, function: FunctionType, method: bool) -> None:
        for cell in function.__closure__ or ():
            self._registry(_content(cell))
        for first, *rest in dotted_names(function.__code__):
            if first != SELF:
                self._global(function.__globals__, (first, *rest))
            elif method and rest and rest[0] not in self._names and not rest[0].startswith("__"):
                self._method(rest[0])

    def _global(self, namespace: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Read a dotted name in a function's globals: a function of its module, of another one, or of torch."""
        name, home = chain[0], str(namespace.get("__name__"))
        value = namespace.get(name)
        self._registry(value)
        owner: Any = None
        for part in chain[1:]:
            if not (isinstance(value, ModuleType) and value.__name__.split(".")[0] == "torch"):
                break
            owner, name, value = value, part, vars(value).get(part)
        if owner is not None:
            if isinstance(value, (FunctionType, *BUILT_IN)):
                self.places[id(owner), name] = vars(owner)
                self._function(value, f"{owner.__name__}.{name}", None)
                if not _named(value, name):
                    self._fault(f"{owner.__name__}.{name}", value)
            return
        expected = home_of(home, name)
        if expected is not None and (expected[0].startswith(NOT_READ) or expected[0].split(".")[0] not in PACKAGES):
            return
        if name in namespace and (expected is not None or isinstance(value, FunctionType)):
            self.places[id(namespace), name] = namespace
            self._function(value, f"{home.rpartition('.')[2]}.{name}", expected)

    def _registry(self, value: Any) -> None:
        """Read the entries of one of transformers' interfaces, those of the class and those of the object."""
        tables: list[Any] = [getattr(value, name, None) for name in ("_global_mapping", "_local_mapping")]
        if not all(type(table) is dict for table in tables) or any(tables[1] is one for one in self.registries):
            return
        self.registries += tables
        for table in tables:
            for key in filter(table.__contains__, KEYS):
                self.places[id(table), key] = table
                self._function(table[key], f"{type(value).__name__}[{key!r}]", None)
                if not getattr(table[key], "__name__", "").startswith(key):
                    self._fault(f"{type(value).__name__}[{key!r}]", table[key])


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


def _functions(value: Any) -> list[Any]:
    """The functions of a class attribute; [] for one that is no function."""
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset, value.fdel) if one is not None]
    if isinstance(value, (FunctionType, *BUILT_IN)):
        return [value]
    name = next((name for kind, name in AROUND.items() if isinstance(value, kind)), None)
    inner = None if name is None else getattr(value, name)
    return [inner] if isinstance(inner, FunctionType) else []


def _layers(function: FunctionType, seen: set[int] | None = None) -> Iterable[FunctionType]:
    """A function, and those inside its closure, which a decorator calls."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    yield function
    for cell in function.__closure__ or ():
        if isinstance(inner := _content(cell), FunctionType):
            yield from _layers(inner, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _of_a_package(value: Any) -> bool:
    """Whether a function is code that one of the PACKAGES defines where the function says."""
    if not isinstance(value, FunctionType):
        return str(getattr(value, "__module__", None) or "torch").split(".")[0] in PACKAGES
    home = module_name(value)
    return home.split(".")[0] in PACKAGES and _is_at(value, home, value.__code__.co_qualname)


def _is_at(value: Any, module: str, name: str) -> bool:
    return value.__code__ in codes_of(module).get(name, ()) if isinstance(value, FunctionType) else True


def _named(value: Any, name: str) -> bool:
    """Whether a function of torch has the name under which it was found, but for underscores and its folder's name."""
    return str(getattr(value, "__name__", name)).replace("_", "").endswith(name.replace("_", ""))
