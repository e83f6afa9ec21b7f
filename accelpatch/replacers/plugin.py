"""Loads a user's own replacers from a Python file (`--plugin FILE`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from accelpatch.errors import PlanError
from accelpatch.replacers import registry


def load_plugin(path: str | Path) -> tuple[str, ...]:
    """Run the Python file at `path`, which registers replacers by `@accelpatch.replacer`; returns the new names.

    The file runs with the user's rights. Raises PlanError where it does not exist or registers nothing; exceptions of
    the file itself pass through.
    """
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"no plugin at {file}; name a Python file that registers a replacer")
    before = dict(registry())
    name = f"accelpatch_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlanError(f"{file} is no Python file; a plugin ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        new = tuple(name for name, made in registry().items() if before.get(name) is not made)
        if not new:
            raise PlanError(
                f"{file} registers no replacer; decorate a Replacer subclass in it with @accelpatch.replacer"
            )
    except BaseException:
        del sys.modules[name]
        raise
    return new
