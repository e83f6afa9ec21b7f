"""Loads a user's own replacers and implementations from a Python file (`--plugin FILE`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from accelpatch.errors import PlanError
from accelpatch.kernels import added
from accelpatch.kernels.dispatch import TABLE
from accelpatch.replacers import registry


def load_plugin(path: str | Path) -> tuple[str, ...]:
    """Run the Python file at `path`, which registers replacers by `@accelpatch.replacer` or implementations of
    operations by `@accelpatch.implementation`; returns the new names.

    The file runs with the user's rights. Raises PlanError where it does not exist or registers nothing; exceptions of
    the file itself pass through.
    """
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"no plugin at {file}; name a Python file that registers a replacer or an implementation")
    before, implementations = dict(registry()), _implementations()
    name = f"accelpatch_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlanError(f"{file} is no Python file; a plugin ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        new = tuple(name for name, made in registry().items() if before.get(name) is not made)
        new += tuple(name for (_, name), made in _implementations().items() if made not in implementations.values())
        if not new:
            raise PlanError(
                f"{file} registers no replacer and no implementation: decorate a Replacer subclass in it with "
                "@accelpatch.replacer, or a function with @accelpatch.implementation"
            )
    except BaseException:
        del sys.modules[name]
        raise
    return new


def _implementations() -> dict[tuple[str, str], added.Added]:
    """(operation, name) -> each implementation that was added."""
    return {(op, name): made for op in TABLE for name, made in added.of(op).items()}
