"""docs/jit.md and docs/jit-passes.md: their programs run, in order, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.jit.kernel import PASSES

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    pytest.param("jit.md", id="jit.md"),
    pytest.param(
        "jit-passes.md", id="jit-passes.md",
        marks=pytest.mark.skipif(not shutil.which("llvm-mca-19"), reason="needs llvm-mca-19: make gate installs it"),
    ),
]  # fmt: skip
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_each_step_runs_and_prints_what_the_page_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / name
    text, names = page.read_text(), {"__name__": "page"}
    for found in BLOCK.finditer(text):
        before = text[: found.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile("\n" * before + found[1], str(page), "exec", dont_inherit=True), names)
            except AccelpatchError as error:
                print(f"{type(error).__name__}: {error}")
        assert printed.getvalue().splitlines() == (found[2] or "").splitlines()


@pytest.mark.parametrize("name", ["jit.md", "jit-passes.md"])
def test_there_are_steps(name: str) -> None:
    assert len(BLOCK.findall((ROOT / "docs" / name).read_text())) > 8


def test_each_pass_has_an_example() -> None:
    text = (ROOT / "docs/jit-passes.md").read_text()
    shown = re.findall(r'^compare\(\w+, "(\w+)"\)', text, re.MULTILINE)
    assert {*shown, "accumulator_moves"} == set(PASSES)
    assert 'accumulators.without("accumulator_moves")' in text
