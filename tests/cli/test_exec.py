"""accelpatch exec: a script runs as python runs it, and its models are patched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Cli, Shell, environment

FACTS = """
import os, sys, json
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": __spec__ is None, "cwd": os.getcwd(),
    "future": (lambda: None).__code__.co_flags,
}, sort_keys=True))
"""
GENERATE = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
before = [type(m).__name__ for m in model.modules()]
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
print(type(model.lm_head).__name__, type(model).__name__, [type(m).__name__ for m in model.modules()] == before)
"""
LIKE_OURS = ["--recipe", "int4", "-m", "--help"]


def _python(*arguments: str, folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), input=text, capture_output=True, text=True, check=False
    )


def _write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("arguments", "words", "as_module"),
    [
        pytest.param(["s.py"], ["s.py"], False, id="none"),
        pytest.param(["s.py", *LIKE_OURS], ["s.py", *LIKE_OURS], False, id="like ours"),
        pytest.param(["-q", "-r", "exact", "s.py", "-q"], ["s.py", "-q"], False, id="ours before"),
        pytest.param(["s.py", "--", "-x", ""], ["s.py", "--", "-x", ""], False, id="a double dash"),
        pytest.param(["--", "s.py", "-m"], ["s.py", "-m"], False, id="a double dash before"),
        pytest.param(["-m", "mod", "--help", "-m", "x"], ["mod", "--help", "-m", "x"], True, id="a module"),
        pytest.param(
            ["-r", "exact", "-q", "-m", "mod", "--", "x"], ["mod", "--", "x"], True, id="ours before a module"
        ),
        pytest.param(["--recipe=exact", "-m", "mod", "--json"], ["mod", "--json"], True, id="joined"),
    ],
)
def test_whose_arguments_are_whose(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: list[str], as_module: bool
) -> None:
    seen: list[tuple[list[str], bool]] = []
    monkeypatch.setattr("accelpatch.cli.script.run", lambda words, as_module: seen.append((words, as_module)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert cli("exec", *arguments).exit_code == 0
    assert seen == [(words, as_module)]


def test_a_script_sees_what_python_shows_it(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "sub/facts.py", FACTS)
    arguments = [*LIKE_OURS, "--", "-x", "--quiet", "two words"]
    expected = _python("sub/facts.py", *arguments, folder=tmp_path, text="some input")
    found = shell("exec", "--quiet", "--recipe", "exact", "sub/facts.py", *arguments, input="some input")
    assert expected.returncode == 0, expected.stderr
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, "", 0)


def test_a_module_sees_what_python_shows_it(shell: Shell, tmp_path: Path) -> None:
    facts = FACTS.replace('"spec": __spec__ is None', '"spec": __spec__.name')
    _write(tmp_path, "package/__init__.py", "")
    _write(tmp_path, "package/facts.py", facts)
    arguments = ["-m", "package.facts", "--recipe", "int4", "-m", "x"]
    expected = _python(*arguments, folder=tmp_path, text="in")
    found = shell("exec", "--quiet", *arguments, input="in")
    assert expected.returncode == 0, expected.stderr
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, "", 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param("import sys; print('out'); sys.exit(3)", 3, id="status"),
        pytest.param("def f():\n    raise MemoryError('mine')\nf()", 1, id="exception"),
    ],
)
def test_the_command_ends_as_the_script_does(shell: Shell, tmp_path: Path, body: str, status: int) -> None:
    _write(tmp_path, "script.py", body)
    expected = _python("script.py", folder=tmp_path)
    found = shell("exec", "--quiet", "script.py")
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)
    assert found.returncode == status


@pytest.mark.smoke
def test_models_are_patched(shell: Shell, tmp_path: Path, model: str) -> None:
    _write(tmp_path, "script.py", GENERATE)
    plain = _python("script.py", model, folder=tmp_path)
    assert plain.stdout == "Linear LlamaForCausalLM True\n"
    found = shell("exec", "--recipe", "int8", "script.py", model)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Int8WeightOnlyLinear")
    assert found.stdout.endswith(" LlamaForCausalLM False\n")
    summary = [line for line in found.stderr.splitlines() if line.startswith("accelpatch: ")]
    assert len(summary) == 1
    assert "patched with int8" in summary[0]


def test_a_script_without_a_model_says_so(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "script.py", "print('hello')")
    found = shell("exec", "script.py")
    assert found.stdout == "hello\n"
    assert found.stderr == "accelpatch: the script used no model that could be patched\n"


def test_a_recipe_that_cannot_be_read_stops_before_the_script(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "script.py", "print('hello')")
    found = shell("exec", "--recipe", "int9", "script.py")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("error: ")


def test_a_recipe_that_does_not_fit_is_one_line(shell: Shell, tmp_path: Path, model: str) -> None:
    _write(tmp_path, "script.py", GENERATE)
    rule = "  - match: {class: NoSuchClass}\n    replace: int8_weight_only\n"
    _write(tmp_path, "mine.yaml", f"name: mine\ndescription: fits nothing\nrules:\n{rule}")
    found = shell("exec", "--recipe", "mine.yaml", "script.py", model)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert len([line for line in found.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_script_that_closes_its_output(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "script.py", "import os, sys\nprint('out', flush=True)\nsys.stdout.close()\n")
    found = shell("exec", "script.py")
    assert (found.stdout, found.returncode) == ("out\n", 0)
