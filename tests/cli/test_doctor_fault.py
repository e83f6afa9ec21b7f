"""accelpatch doctor fault: runs a program, or reads a log, and names the kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accelpatch.cli import facts
from tests.support.fault_recordings import ROCM_6, SANITIZER

from .conftest import Cli, Shell


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "torch_facts", lambda: {"devices": []})


def test_a_program_that_is_well(cli: Cli) -> None:
    done = cli("doctor", "fault", "--", sys.executable, "-c", "print('fine')")
    assert done.exit_code == 0
    assert done.stdout.startswith("no fault      of the GPU was seen\nprogram       ended with status 0\n")
    assert "fine\n" in done.stderr
    assert Path("fault/output.txt").read_text() == "fine\n"


def test_options_after_the_program_are_the_programs(cli: Cli) -> None:
    done = cli("doctor", "fault", sys.executable, "-c", "import sys; print(sys.argv)", "--json", "--out", "x", "--help")
    assert done.exit_code == 0
    assert "['-c', '--json', '--out', 'x', '--help']" in done.stderr


def test_a_program_that_is_stopped(shell: Shell) -> None:
    done = shell("doctor", "fault", "--json", "--vendor", "cpu", "--", sys.executable, "-c", "import os; os.abort()")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["faults"][0]["kind"] == "the process was stopped: Aborted"
    assert found["status"] == -6
    assert found["variables"]["PYTHONFAULTHANDLER"] == "1"


def test_settings_of_a_vendor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "torch_facts", lambda: {"devices": [{"vendor": "cpu"}, {"vendor": "amd"}]})
    code = "import os; print(os.environ['AMD_SERIALIZE_KERNEL'], os.environ.get('PYTORCH_NO_HIP_MEMORY_CACHING'))"
    done = cli("doctor", "fault", "--no-tool", "--caching", "--", sys.executable, "-c", code)
    assert "3 None\n" in done.stderr
    assert "AMD_SERIALIZE_KERNEL=3" in done.stdout


def test_a_log(cli: Cli) -> None:
    Path("agent.txt").write_text(ROCM_6)
    Path("sanitizer.txt").write_text(SANITIZER)
    done = cli("doctor", "fault", "--log", "agent.txt", "--log", "sanitizer.txt")
    assert done.exit_code == 0
    assert "kernel       scale(float*, float const*, int)\nsource       /opt/demo/scale.hip:7" in done.stdout
    assert "threads      thread (31,0,0) of block (2,0,0)" in done.stdout
    assert len(json.loads(cli("doctor", "fault", "--log", "agent.txt", "--json").stdout)) == 1
    assert not Path("fault").exists()


def test_a_log_of_nothing(cli: Cli) -> None:
    Path("log").write_bytes(bytes(range(256)) * 100)
    done = cli("doctor", "fault", "--log", "log")
    assert (done.exit_code, done.stdout) == (0, "no fault  is known by these logs\n")


def test_a_program_that_takes_too_long(cli: Cli) -> None:
    done = cli("doctor", "fault", "--timeout", "0.5", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert done.exit_code == 1
    assert "did not end in time" in done.stdout
    assert "warning: stopped after 0.5 s" in done.stderr


def test_a_program_that_is_not_there(cli: Cli) -> None:
    done = cli("doctor", "fault", "--", "no-such-program")
    assert done.exit_code == 1
    assert "error: no-such-program cannot be run: No such file or directory" in done.stderr


def test_a_folder_that_holds_something(cli: Cli) -> None:
    Path("fault").mkdir()
    Path("fault/output.txt").write_text("of an earlier run")
    done = cli("doctor", "fault", "--", sys.executable, "-c", "")
    assert done.exit_code == 1
    assert "name a new folder" in done.stderr
    assert Path("fault/output.txt").read_text() == "of an earlier run"


@pytest.mark.parametrize(
    "words", [[], ["--log", "missing"], ["--log", __file__, "python"], ["--vendor", "intel", "python"]], ids=" ".join
)
def test_wrong_usage(cli: Cli, words: list[str]) -> None:
    assert cli("doctor", "fault", *words).exit_code == 2
