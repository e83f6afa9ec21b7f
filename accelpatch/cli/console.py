"""Terminal output: results on stdout, all else on stderr; colours and progress bars only on a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelpatch.progress import bars

progress_bars = bars


def print_error(message: str) -> None:
    """Print one ``error:`` line on stderr, red where stderr is a terminal and NO_COLOR is not set."""
    from rich.console import Console
    from rich.text import Text

    Console(file=sys.stderr, highlight=False).print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def note(message: str) -> None:
    """Print a line on stderr, so that stdout holds nothing but the result."""
    print(message, file=sys.stderr, flush=True)


def warning(message: str) -> None:
    """Print one ``warning:`` line on stderr."""
    note(f"warning: {message}")


def plain_warnings() -> None:
    """Show the warnings of accelpatch's own code as `warning` does; those of other code as Python does."""
    own, stock = str(Path(__file__).parents[1]), warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if filename.startswith(own) and file is None:
            warning(str(message))
        else:
            stock(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """A copy of ``value`` in which NaN and infinite floats are None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def print_facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print (name, value) pairs as two columns on stdout; values may have several lines."""
    listed = [
        ("" if place else name, line) for name, value in pairs for place, line in enumerate(value.splitlines() or [""])
    ]
    width = max((len(name) for name, _ in listed), default=0)
    for name, line in listed:
        print(f"{name:<{width}}  {line}".rstrip())


def print_result(json: bool, document: Any, facts: Iterable[tuple[str, str]]) -> None:
    """Print what a command found: with ``--json`` the document, else the facts."""
    if json:
        print_json(document)
    else:
        print_facts(facts)


def quiet_transformers() -> None:
    """Silence transformers' warnings and progress bars, unless the user's environment variables say otherwise.

    Call before transformers is imported: it reads these once.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logging.getLogger("transformers").setLevel(logging.ERROR)
