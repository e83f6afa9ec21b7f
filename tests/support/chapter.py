"""Runs a page of docs from its first line to its last, as a reader does who types what it shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from typer.testing import CliRunner

from accelpatch.cli import app

#: a line that ends in the name of a file, where the block is one; the block's language and its text
BLOCK = re.compile(r"(?:`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(file name or "", language, text) of each block, in order."""
    for found in BLOCK.finditer(page):
        yield found[1] or "", found[2], found[3]


def run(page: Path, folder: Path, leave_out: str = "") -> list[str]:
    """Run the blocks of a page in a folder, which is the current one; returns the kinds of those that ran.

    Files are written, Python is run in one module, commands in this process, and what a block of text shows is what the
    one before it printed. leave_out: words of blocks that cannot run here; what they print is left out too.
    """
    module = ModuleType("chapter")
    sys.modules["chapter"] = module
    ran, printed = [], ""
    for name, language, text in blocks(page.read_text()):
        skipped = bool(leave_out) and leave_out in text
        if name:
            (folder / name).write_text(text)
        elif language == "text":
            assert printed is None or printed.strip() == text.strip(), printed
            continue
        elif language == "python":
            printed = None if skipped else _python(text, module, folder)
        elif language == "sh":
            printed = None if skipped else "\n".join(_command(line) for line in text.splitlines())
        else:
            raise AssertionError(f"{page}: a block of {language} has no file's name before it")
        ran += [] if skipped else [name or language]
    return ran


def _python(text: str, module: ModuleType, folder: Path) -> str:
    """What a block prints. It is a file of the folder, so that names of files are beside it."""
    file = folder / f"block_{len(vars(module))}.py"
    file.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(text, str(file), "exec"), vars(module))
    return said.getvalue()


def _command(line: str) -> str:
    program, *words = shlex.split(line)
    assert program == "accelpatch"
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout
