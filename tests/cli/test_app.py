"""What all commands share: start, statuses, errors, colours, interrupts."""

from __future__ import annotations

import importlib.metadata
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from .conftest import Cli, Shell, environment

ESCAPE = "\x1b["
COMMANDS = ["run", "chat", "plan", "recipes", "eval", "bench", "doctor", "selftest", "cache", "exec"]


def test_help_is_quick() -> None:
    """Seconds of the processor: those of the wall where nothing else runs, and help waits for nothing."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "accelpatch", "--help"], env=environment(), check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], id="help"),
        pytest.param(["run", "--help"], id="help of a command"),
        pytest.param(["recipes"], id="recipes"),
        pytest.param(["recipes", "show", "int8"], id="a recipe"),
        pytest.param(["cache", "list"], id="cache"),
    ],
)
def test_these_load_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "accelpatch", *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    imported = {
        line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "accelpatch.cli.app" in imported
    assert imported & {"torch", "transformers", "numpy"} == set()


def test_help_lists_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    assert [name for name in COMMANDS if not re.search(rf"^\W*{name} ", result.stdout, re.MULTILINE)] == []


def test_version_of_a_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli("--version").stdout == "accelpatch of unknown version\n"


def test_version(shell: Shell) -> None:
    result = shell("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"accelpatch \d+\.\d+\.\d+\S*\n", result.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["rum"], id="no such command"),
        pytest.param(["--no-such"], id="no such option"),
        pytest.param(["run", "--max-new-tokens", "0"], id="run: no tokens"),
        pytest.param(["run", "--temperature", "-1"], id="run: negative temperature"),
        pytest.param(["run", "--prompt", ""], id="run: empty prompt"),
        pytest.param(["run", "--prompt", " \n"], id="run: blank prompt"),
        pytest.param(["run", "--dtype", "int3"], id="run: no such dtype"),
        pytest.param(["run", "--plugin", "missing.py"], id="run: plugin is missing"),
        pytest.param(["run", "a", "b"], id="run: two models"),
        pytest.param(["plan", "--max-length", "none"], id="plan: no number"),
        pytest.param(["recipes", "show"], id="recipes: no name"),
        pytest.param(["eval", "--text", "missing.txt"], id="eval: text is missing"),
        pytest.param(["bench", "--new-tokens", "1"], id="bench: nothing to decode"),
        pytest.param(["bench", "--repeats", "0"], id="bench: no repeats"),
        pytest.param(["doctor", "now"], id="doctor: an argument"),
        pytest.param(["selftest", "--device", "abacus"], id="selftest: no such device"),
        pytest.param(["selftest", "--device", "meta"], id="selftest: a device without kernels"),
        pytest.param(["cache"], id="cache: no command"),
        pytest.param(["cache", "wipe"], id="cache: no such command"),
        pytest.param(["exec"], id="exec: no script"),
        pytest.param(["exec", "missing.py"], id="exec: script is missing"),
        pytest.param(["exec", "--recipe"], id="exec: no recipe"),
    ],
)
def test_usage_errors(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert re.search("Usage:|Error", result.stderr + result.stdout)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["run", "--recipe", "int9"], "did you mean 'int8'", id="misspelt recipe"),
        pytest.param(["run", "--recipe", "missing.yaml"], "missing.yaml", id="recipe file is missing"),
        pytest.param(["run", "llama2-7"], "llama2-7b", id="run: misspelt model"),
        pytest.param(["plan", "smolm2-135m"], "smollm2-135m", id="plan: misspelt model"),
        pytest.param(["plan", "gpt2", "--arch", "gfx000"], "gfx942", id="plan: no such arch"),
        pytest.param(["run", "--device", "cuda:99"], "cuda:99", id="device is not here"),
    ],
)
def test_failures_are_one_line(cli: Cli, arguments: list[str], words: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 1
    assert_one_line(result, words)


def test_a_failure_of_a_process_is_one_line(shell: Shell) -> None:
    result = shell("exec", "-m", "no_such.module")
    assert result.returncode == 1
    assert_one_line(result, "no_such")


def assert_one_line(result: Result | subprocess.CompletedProcess[str], words: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def _in_terminal(*arguments: str, **variables: str) -> str:
    """Everything that the command writes to a terminal."""
    controller, terminal = pty.openpty()
    env = {key: value for key, value in environment().items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color"} | variables
    command = [sys.executable, "-m", "accelpatch", *arguments]
    process = subprocess.Popen(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = b""
    while True:
        try:
            piece = os.read(controller, 4096)
        except OSError:  # Linux says EIO where the last writer of a terminal is gone
            break
        if not piece:
            break
        written += piece
    os.close(controller)
    process.wait(timeout=60)
    return written.decode()


def test_errors_are_red_in_a_terminal() -> None:
    assert "\x1b[1;31merror:" in _in_terminal("run", "--recipe", "int9")


def test_no_color_is_kept_in_a_terminal() -> None:
    written = _in_terminal("run", "--recipe", "int9", NO_COLOR="1")
    assert "error:" in written
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", written)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["recipes"], ["run", "--recipe", "int9"], ["doctor"], ["rum"]], ids=" ".join
)
def test_no_escape_codes_in_a_pipe(shell: Shell, arguments: list[str]) -> None:
    result = shell(*arguments)
    assert result.stdout + result.stderr != ""
    assert ESCAPE not in result.stdout + result.stderr


def test_ctrl_c_while_it_answers(endless_model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelpatch", "run", endless_model, "--max-new-tokens", "100000"]
    process = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read(1) != ""  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m accelpatch recipes show int8 | head -n 1"
    result = subprocess.run(command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("name: int8\n", "")


def test_a_defect_of_ours_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("accelpatch.recipe.recipe.bundled", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        cli("recipes")


def test_out_of_memory_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise MemoryError("12 GB wanted")

    monkeypatch.setattr("accelpatch.recipe.recipe.bundled", full)
    result = cli("recipes")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: out of memory: 12 GB wanted")
