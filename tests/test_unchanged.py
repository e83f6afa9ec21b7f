"""scripts/unchanged.py: what it reads and imports decides whether a command runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent.parent


@pytest.fixture
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script over a repository of its own: scripts/check.py imports package.used, beside package.other."""
    for name, text in {
        "scripts/check.py": "def late():\n    from package import used\n",
        "scripts/setup.sh": "",
        "scripts/unchanged.py": "",
        "package/__init__.py": "import package.other\n",
        "package/used.py": "x = 1\n",
        "package/other.py": "x = 1\n",
        "data/kernel.hip": "// none\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    spec = importlib.util.spec_from_file_location("unchanged", HERE / "scripts/unchanged.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PASSED", tmp_path / "scripts/unchanged.json")
    module.PASSED.write_text("{}")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("ALL", raising=False)
    return module


def once(module: Any, command: str = "exit 0") -> bool:
    """Whether the command runs, and then does not run again."""
    return runs(module, command) > runs(module, command)


def runs(module: Any, command: str = "exit 0") -> bool:
    """Whether the command ran: it leaves a line in a file that git does not know of."""
    log = module.ROOT / ".git/log"
    before = log.read_text() if log.exists() else ""
    words = ["sh", "-c", f"echo ran >> .git/log; {command}"]
    module.main(["check", "scripts/check.py", "data", "--", *words])
    return bool(log.read_text() != before)


@pytest.mark.parametrize("file", ["scripts/check.py", "package/used.py", "data/kernel.hip", "scripts/setup.sh"])
def test_it_runs_again_where_what_it_reads_has_changed(unchanged: Any, file: str) -> None:
    assert once(unchanged)
    with (unchanged.ROOT / file).open("a") as end:
        end.write("\n")
    assert once(unchanged)


def test_what_it_does_not_read_may_change(unchanged: Any) -> None:
    assert runs(unchanged)
    (unchanged.ROOT / "package/other.py").write_text("x = 2\n")
    assert not runs(unchanged)


def test_a_new_file_of_a_folder_and_another_command_count(unchanged: Any) -> None:
    assert once(unchanged)
    (unchanged.ROOT / "data/more.hip").write_text("")
    assert once(unchanged)
    assert once(unchanged, "true")


def test_a_command_that_fails_is_not_written_down(unchanged: Any) -> None:
    assert [runs(unchanged, "exit 3"), runs(unchanged, "exit 3")] == [True, True]
    assert json.loads(unchanged.PASSED.read_text()) == {}


@pytest.mark.parametrize("name", ["CI", "ALL"])
def test_nothing_is_written_in_ci_and_everything_runs_when_asked(
    unchanged: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "true")
    assert runs(unchanged)
    assert json.loads(unchanged.PASSED.read_text()) == {}
    monkeypatch.delenv(name)
    assert runs(unchanged)
    monkeypatch.setenv(name, "true")
    assert runs(unchanged) == (name == "ALL")


def test_a_path_or_a_command_that_is_not_there_is_an_error(unchanged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no file of the repository is sources"):
        unchanged.main(["check", "sources", "--", "true"])
    with pytest.raises(SystemExit):
        unchanged.main(["check", "data"])
    assert "the command is missing" in capsys.readouterr().err
