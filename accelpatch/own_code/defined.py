"""What an installed package defines: the code objects of a module by qualified name, and where a name is imported from.

It is read from the module's compiled code, as its loader gives it, so that it does not show functions that were
replaced after the import.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FunctionType

SELF = "self"
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _spec(name: str) -> ModuleSpec | None:
    """The spec of an imported module, also of one that has replaced itself in sys.modules."""
    found = getattr(sys.modules.get(name), "__spec__", None)
    if found is None and name in sys.modules:
        folder = getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", None)
        found = None if folder is None else PathFinder.find_spec(name, folder)
    return found


@functools.cache
def _module_code(name: str) -> CodeType | None:
    """The code of a module; None where it has none (an extension, a program's own `__main__`)."""
    spec = _spec(name)
    read = getattr(getattr(spec, "loader", None), "get_code", None)
    try:
        found = None if read is None else read(name)
    except (ImportError, OSError):
        return None
    return found if isinstance(found, CodeType) else None


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inside(constant)


@functools.cache
def codes_of(module: str) -> Mapping[str, tuple[CodeType, ...]]:
    """Qualified name -> its code objects in a module, several where it is redefined; {} for a module without code."""
    code = _module_code(module)
    found: dict[str, tuple[CodeType, ...]] = {}
    for one in () if code is None else _inside(code):
        found[one.co_qualname] = (*found.get(one.co_qualname, ()), one)
    return found


@functools.cache
def _imports(module: str) -> Mapping[str, tuple[str, str]]:
    """Name in a module -> (module, name) that it is imported from."""
    code = _module_code(module)
    package = getattr(_spec(module), "parent", None)
    found: dict[str, tuple[str, str]] = {}
    level, home, name = 0, "", ""
    for one in () if code is None or package is None else dis.get_instructions(code):
        if one.opname == "LOAD_CONST" and type(one.argval) is int:
            level = one.argval
        elif one.opname == "IMPORT_NAME":
            home = importlib.util.resolve_name("." * level + one.argval, package) if level else one.argval
        elif one.opname == "IMPORT_FROM":
            name = one.argval
        elif one.opname == "STORE_NAME" and name:
            found[one.argval], name = (home, name), ""
    return found


@functools.cache
def origin_of(module: str, name: str) -> tuple[str, str]:
    """(module, name) where an object that a module has under a name is defined: there, or where it was imported
    from."""
    seen = set()
    while (module, name) not in seen and name not in codes_of(module):
        seen.add((module, name))
        module, name = _imports(module).get(name, (module, name))
    return module, name


@functools.cache
def home_of(module: str, name: str) -> tuple[str, str] | None:
    """(module, name) of the function that a module has under a name; None for a name that is no function's."""
    home, own = origin_of(module, name)
    codes = codes_of(home).get(own, ())
    return (home, own) if codes and all(one.co_flags & inspect.CO_OPTIMIZED for one in codes) else None  # no class


def module_name(function: FunctionType) -> str:
    """The name of the module in whose globals a function runs."""
    return str(function.__globals__.get("__name__", ""))


@functools.cache
def dotted_names(code: CodeType) -> frozenset[tuple[str, ...]]:
    """The names of globals in a function, and in those inside it, each with the attributes that are read off it at
    once; and the attributes of `self`, behind that name."""
    found = set()
    for one in _inside(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(one):
            loaded = instruction.argval
            loaded = loaded[-1] if isinstance(loaded, tuple) and loaded else loaded  # two variables at once, from 3.13
            if instruction.opname == "LOAD_GLOBAL" or loaded == SELF:
                found.add(chain)
                chain = (loaded,)
            elif instruction.opname in ATTRIBUTES and chain:
                chain = (*chain, loaded)
            elif chain:
                found.add(chain)
                chain = ()
        found.add(chain)
    return frozenset(found - {()})
