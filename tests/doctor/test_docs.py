"""docs/troubleshooting.md: its commands run, and what they print is what it shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accelpatch.doctor.settings import TOPICS
from tests.support import chapter

PAGE = Path(__file__).parent.parent.parent / "docs/troubleshooting.md"


def test_the_chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert chapter.run(PAGE, tmp_path) == ["program.py", "sh", "agent.txt", "sh", "sh", "sh"]
    assert (tmp_path / "fault/output.txt").read_text() == "the sum is 0.0\n"


def test_it_has_every_topic() -> None:
    table = PAGE.read_text().partition("### Topics")[2]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == list(TOPICS)
