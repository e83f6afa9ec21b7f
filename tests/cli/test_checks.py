"""Wrong arguments are refused with the true reason before torch is imported, and so within a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelpatch.recipe import replacers
from accelpatch.replacers import BUILT_IN
from tests.support import warm_python

from .conftest import environment

PROGRAM = """
import json, sys
from typer.testing import CliRunner
from accelpatch.cli import app
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    print(json.dumps([result.exit_code, result.stderr, repr(result.exception), "torch" in sys.modules]))
"""
UNKNOWN = (
    "name: a\ndescription: b\nrules:\n  - match: {role: linear}\n    replace: half_weight\nverify:\n  bound: 0.1\n"
)
FILES: dict[str, bytes] = {
    "empty.txt": b"",
    "latin.txt": b"caf\xe9",
    "nul.txt": b"a\0b",
    "good.txt": b"words",
    "bad.yaml": b"name: [",
    "unknown.yaml": UNKNOWN.encode(),
    "bad.py": b"def x(",
    "plugin.txt": b"",
    "file": b"x",
    "stats": b"\x10\0\0\0\0\0\0\0{}",
}
CASES: dict[str, tuple[str, int, str]] = {
    "plan: folder": ("plan ./missing", 1, "no such file or folder"),
    "plan: arch": ("plan smollm2-135m --arch gfx000", 1, "gfx942"),
    "plan: recipe": ("plan smollm2-135m --recipe bad.yaml", 1, "bad.yaml:1:8"),
    "plan: replacer": ("plan smollm2-135m --recipe unknown.yaml", 1, "no replacer is called half_weight"),
    "plan: no plugin": ("plan smollm2-135m --plugin plugin.txt", 1, "ends in .py"),
    "plan: patched": ("plan own", 1, "is a saved patched model"),
    "quantize: folder": ("quantize ./missing --out out", 1, "no such file or folder"),
    "quantize: into /proc": ("quantize MODEL --out /proc/x", 1, "/proc takes no new files (No such file or directory)"),
    "quantize: into a file": ("quantize MODEL --out file", 1, "is a file"),
    "quantize: below a file": ("quantize MODEL --out file/x", 1, "(Not a directory)"),
    "quantize: over files": ("quantize MODEL --out full", 1, "no model that accelpatch saved"),
    "quantize: over files, forced": ("quantize MODEL --out full --overwrite", 1, "no model that accelpatch saved"),
    "quantize: over its own": ("quantize MODEL --out own", 1, "give --overwrite"),
    "quantize: shards": ("quantize MODEL --out out --max-shard-size 5", 1, "max_shard_size"),
    "quantize: statistics": ("quantize MODEL --out out --statistics stats", 1, "cannot be read as statistics"),
    "quantize: dtype": ("quantize MODEL --out out --dtype int3", 2, "bfloat16"),
    "quantize: device": ("quantize MODEL --out out --device abacus", 2, "cuda:N"),
    "calibrate: into /proc": ("calibrate MODEL --out /proc/x", 1, "name another file"),
    "calibrate: no folder": ("calibrate MODEL --out missing/x", 1, "there is no folder missing"),
    "calibrate: a folder": ("calibrate MODEL --out full", 1, "is a folder"),
    "calibrate: empty text": ("calibrate MODEL --out out --data empty.txt", 1, "holds no text"),
    "eval: no text": ("eval MODEL --text missing.txt", 2, "does not exist"),
    "eval: empty text": ("eval MODEL --text empty.txt", 1, "holds no text"),
    "eval: latin-1": ("eval MODEL --text latin.txt", 1, "not UTF-8 text"),
    "eval: binary": ("eval MODEL --text nul.txt", 1, "has a NUL"),
    "eval: patched": ("eval own --text good.txt", 1, "is a saved patched model"),
    "bench: plot": ("bench MODEL --plot missing/x.png", 1, "there is no folder missing"),
    "bench: recipe": ("bench MODEL --new-tokens 9 --prompt-tokens 9 --recipe int9", 1, "did you mean 'int8'"),
    "bench: context": ("bench MODEL --prompt-tokens 250 --new-tokens 10", 1, "context of 256"),
    "export: float": ("export MODEL --to gptq", 1, "holds float weights"),
    "export: over files": ("export own --to gptq --out full", 1, "is not empty"),
    "inspect": ("inspect missing", 1, "no such file or folder"),
    "build: into /proc": ("build --out /proc/x", 1, "/proc takes no new files"),
    "tune": ("tune attention --lengths x", 2, "such as 64,128"),
    "exec: recipe": ("exec --recipe int9 bad.py", 1, "did you mean 'int8'"),
    "selftest: device": ("selftest --device meta", 2, "cuda:N"),
}


@pytest.fixture(scope="module")
def outcomes(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What each case prints: all run in one process, in a folder of their own."""
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    folder = tmp_path_factory.mktemp("arguments")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, quantised in (("full", None), ("own", {"quant_method": "accelpatch"})):
        (folder / name).mkdir()
        config = {"model_type": "llama"} | ({} if quantised is None else {"quantization_config": quantised})
        (folder / name / "config.json").write_text(json.dumps(config))
    lines = [[model if word == "MODEL" else word for word in line.split()] for line, _, _ in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(lines), capture_output=True, text=True, cwd=folder,
        timeout=60, env=environment(), check=True,
    )  # fmt: skip
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True)), folder


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments(outcomes: tuple[dict[str, Any], Path], case: str) -> None:
    _, due, words = CASES[case]
    status, printed, exception, torch_is_here = outcomes[0][case]
    assert status == due, (printed, exception)
    assert words in " ".join(printed.replace("│", " ").split())
    assert not torch_is_here


def test_nothing_is_left_behind(outcomes: tuple[dict[str, Any], Path]) -> None:
    assert {path.name for path in outcomes[1].iterdir()} == {*FILES, "full", "own"}
    assert [path.name for path in (outcomes[1] / "full").iterdir()] == ["config.json"]


def test_a_plugin_that_is_no_python_is_shown_as_python_does(model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(FILES["bad.py"])
    command = ["-m", "accelpatch", "plan", model, "--plugin", "bad.py"]
    done = warm_python.run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith('  File "bad.py", line 1\n')
    assert "SyntaxError" in done.stderr


def test_the_names_of_the_replacers_are_those_of_the_registry() -> None:
    assert tuple(one.name for one in BUILT_IN) == replacers.BUILT_IN
