"""docs/jit.md: its programs run, in order, and print what it shows; errors are those of its lines."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from accelpatch.errors import AccelpatchError

PAGE = Path(__file__).parent.parent.parent / "docs" / "jit.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def test_each_step_runs_and_prints_what_the_page_shows() -> None:
    text, names = PAGE.read_text(), {"__name__": "page"}
    for found in BLOCK.finditer(text):
        before = text[: found.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile("\n" * before + found[1], str(PAGE), "exec", dont_inherit=True), names)
            except AccelpatchError as error:
                print(f"{type(error).__name__}: {error}")
        assert printed.getvalue().splitlines() == (found[2] or "").splitlines()


def test_there_are_steps() -> None:
    assert len(BLOCK.findall(PAGE.read_text())) > 8
