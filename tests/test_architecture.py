"""docs/architecture.md and CONTRIBUTING.md stay true: rooms, files, functions, the picture, targets and links."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

import accelpatch
from accelpatch.models import embedded
from tests.cli.conftest import byte_tokenizer, save_model
from tests.support.imports import IMPORTS

ROOT = Path(__file__).parent.parent
PAGE, DOOR = ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"
PAGES = [PAGE, DOOR, *sorted((ROOT / "docs" / "contributing").glob("*.md"))]
ROWS = re.findall(r"^\| (.*) \| (`.*\.\w+`) \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_rooms_are_those_of_the_layout() -> None:
    rooms = PAGE.read_text().partition("## The rooms")[2].partition("## The way of a recipe")[0]
    listed = [name for cell in re.findall(r"^\| (`.*?`) \|", rooms, re.MULTILINE) for name in names(cell)]
    assert sorted(listed) == sorted(IMPORTS)
    inside = (ROOT / "accelpatch").iterdir()
    there = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(listed) == there


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_the_ways_name_what_is_there(row: tuple[str, str, str]) -> None:
    """Every file, and every function or class of a row in one of its files."""
    text = "".join((ROOT / "accelpatch" / file).read_text() for file in names(row[1]))
    for name in names(row[2]):
        python, cpp = rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", rf"^(?:inline|extern) .* {name}\("
        assert re.search(f"{python}|{cpp}", text, re.MULTILINE), name


def test_there_are_ways() -> None:
    assert len(ROWS) > 30


def test_the_report_is_todays() -> None:
    """The lines of its table, as a plan has them without weights."""
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    fused, *table = [line for line in shown.splitlines() if not line.startswith(("verified", "3 calls", "4 calls"))]
    printed = str(accelpatch.plan_from_config("smollm2-135m", "int8")).splitlines()
    assert fused in printed
    lines = [line[: len(table[0])].rstrip() for line in printed]
    assert table == [line for line in lines if line in table]


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model: it ends with the lines that the page shows."""
    tiny = save_model(tmp_path / "tiny", tokenizer=byte_tokenizer())
    monkeypatch.setattr(embedded, "folder", lambda *_: tiny)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(program, {})
    *_, modules, steps = capsys.readouterr().out.splitlines()
    assert f"\n{modules}\n{steps}\n```" in PAGE.read_text()


def test_the_picture_is_the_drawn_one() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_architecture.py"))["drawing"]()
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn


def test_every_target_of_the_makefile_is_explained() -> None:
    (listed,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    explained = set(re.findall(r"^\| `make ([\w-]+)` \|", DOOR.read_text(), re.MULTILINE))
    assert explained == set(listed.split()) - {"help", "smoke", "force"}
    for line in {name for name in names(DOOR.read_text()) if name.startswith("make ")}:
        done = subprocess.run(["sh", "-c", f"{line} --dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def heading(page: Path, anchor: str) -> bool:
    """Whether a page has a heading that GitHub gives this anchor."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        name, _, anchor = target.partition("#")
        assert (page.parent / name).is_file(), target
        assert not anchor or heading(page.parent / name, anchor), target
    if page == PAGE:
        return
    shown = set(re.findall(r"^(?:.* )?`([\w/]+\.py)`:$", page.read_text(), re.MULTILINE))
    rooted = re.findall(r"`((?:accelpatch|tests|scripts|docs|recipes)/[\w/.-]*)`", page.read_text())
    assert [name for name in rooted if not (ROOT / name).exists() and name not in shown] == []
