"""Reads the messages of a conversation from a terminal or from lines of stdin, and notices Ctrl-C during an answer."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

from accelpatch.errors import AccelpatchError

from . import console

FENCE = '"""'  # a line of only this begins or ends a message of several lines


class Ended(Exception):
    """There are no more messages."""


class Reader:
    """Messages from stdin. On a terminal lines are edited by readline, where Python has it."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # input() uses it once it is imported

    def message(self) -> str:
        """The next message, of one line or several. Raises Ended after the last one."""
        while True:
            try:
                return self._message()
            except EOFError:
                if self._terminal:
                    print()
                raise Ended from None
            except UnicodeError:
                if not self._terminal:
                    raise AccelpatchError("what stdin holds is not UTF-8 text") from None
                console.note("(not sent: it is not UTF-8 text)")
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print("\n(Ctrl-D or /exit ends)")

    def _message(self) -> str:
        line = self._line("> ")
        if line.strip() == FENCE:
            return "\n".join(self._until(lambda line: line.strip() == FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines)

    def _until(self, last: Callable[[str], bool]) -> Iterator[str]:
        """The lines before the first one for which `last` is true, or before the end of the input."""
        with contextlib.suppress(EOFError):
            while not last(line := self._line(". ")):
                yield line

    def _line(self, prompt: str) -> str:
        """A line without its newline. Raises EOFError after the last one, and UnicodeError if it is not UTF-8."""
        line = f"{input(prompt)}\n" if self._terminal else sys.stdin.readline()
        if not line:
            raise EOFError
        line.encode()  # raises for surrogates: bytes that were not UTF-8
        return line.rstrip("\r\n")


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed; the second Ctrl-C raises KeyboardInterrupt."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
