"""The command line: one module per command; the work itself is done by the Python API."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .app import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with ``arguments`` (default: the process's own) and exit with its status.

    Status 0 is success, 1 a failure with one ``error:`` line on stderr, 2 a usage error, 130 an interrupt.
    """
    import typer

    # Not `app()`: that would install typer's own sys.excepthook, which `exec` must not change under a user's script.
    try:
        typer.main.get_command(app)(args=None if arguments is None else list(arguments), prog_name="accelpatch")
    except KeyboardInterrupt:
        sys.exit(130)
