"""What goes to the terminal: results on stdout, the rest on stderr, colours and bars only where a person looks."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]


def stderr() -> Console:
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def print_error(message: str) -> None:
    """One ``error:`` line on stderr, red where stderr is a terminal and NO_COLOR is not set."""
    from rich.text import Text

    stderr().print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def note(message: str) -> None:
    """A line for the person at the terminal, on stderr so that stdout stays the result."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout. NaN and infinities become null, which JSON can say."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """``value`` with every float that JSON cannot say replaced by None."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def print_facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Two columns on stdout: what, and its value."""
    listed = [(name, line) for name, value in pairs for name, line in zip_first(name, value.splitlines() or [""])]
    width = max((len(name) for name, _ in listed), default=0)
    for name, line in listed:
        print(f"{name:<{width}}  {line}".rstrip())


def zip_first(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """The name beside the first line, nothing beside the others."""
    return zip([name, *[""] * (len(lines) - 1)], lines, strict=True)


@contextmanager
def progress_bars() -> Iterator[Progress | None]:
    """Bars on stderr, one a stage, as ``(stage, done, total)`` calls come in; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total or None)
        bars.update(tasks[stage], completed=done, total=total or None)

    with bars:
        yield advance


def quiet_transformers() -> None:
    """Keep transformers' warnings and bars out of a command's output; what the user has set in the environment wins.

    Call before transformers is imported: it reads these once.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logging.getLogger("transformers").setLevel(logging.ERROR)
