"""The user's Python line that a register or an instruction comes from, and errors that name it."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from accelpatch.errors import CompileError

#: modules whose lines are not the user's: the jit's own, and those that call the context managers of ``with``
_OURS = re.compile(r"accelpatch\.jit(\..*)?|contextlib|functools")


class Line(NamedTuple):
    """A line of a Python file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"

    @property
    def assigned(self) -> str:
        """The name that the line assigns to, "" where it assigns to none."""
        found = re.match(r"\s*([A-Za-z_]\w*)\s*(?:\[.*\])?\s*=[^=]", linecache.getline(self.file, self.number))
        return found[1] if found else ""


def here() -> Line:
    """The innermost line of the call stack that is not the jit's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _OURS.fullmatch(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def fail(message: str, line: Line | None = None) -> NoReturn:
    """Raise CompileError whose message begins with the Python line, by default that of here()."""
    raise CompileError(f"{line or here()}: {message}")
