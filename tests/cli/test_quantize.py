"""accelpatch quantize, and accelpatch run on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli, Shell

SHORT = ("--max-new-tokens", "8")
FILES = {"config.json", "generation_config.json", "recipe.yaml", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja"}  # fmt: skip


@pytest.fixture(scope="module")
def patched(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that the command writes."""
    from typer.testing import CliRunner

    from accelpatch.cli import app

    out = tmp_path_factory.mktemp("quantised") / "out"
    result = CliRunner().invoke(app, ["quantize", model, "--recipe", "int4", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    return str(out)


@pytest.mark.smoke
def test_one_table_and_nothing_else(shell: Shell, model: str, tmp_path: Path) -> None:
    result = shell("quantize", model, "--recipe", "int4", "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no warnings, no bars
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    for name in ("model", "recipe", "sites replaced", "weights", "folder", "verified"):
        assert names.count(name) == 1
    assert "accelpatch run out" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_json(cli: Cli, model: str, tmp_path: Path) -> None:
    document = json.loads(cli("quantize", model, "--json", "--out", str(tmp_path / "out")).stdout)
    assert document["folder"] == str(tmp_path / "out")
    assert document["report"]["recipe"] == "int8"
    assert document["report"]["replaced"] > 0


def test_shards_and_dtype(cli: Cli, model: str, tmp_path: Path) -> None:
    options = ("--max-shard-size", "50KB", "--dtype", "bfloat16", "--out", str(tmp_path / "out"))
    assert cli("quantize", model, *options).exit_code == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_without_a_tokenizer(cli: Cli, bare_model: str, tmp_path: Path) -> None:
    assert cli("quantize", bare_model, "--out", str(tmp_path / "out")).exit_code == 0
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_run_answers_as_the_patched_model(cli: Cli, model: str, patched: str) -> None:
    due = json.loads(cli("run", model, "--recipe", "int4", "--json", *SHORT).stdout)
    found = json.loads(cli("run", patched, "--json", *SHORT).stdout)
    assert found["answer"] == due["answer"] != ""
    assert found["recipe"] == "int4"
    assert found["report"]["replaced"] == due["report"]["replaced"]


def test_run_as_a_user_does(shell: Shell, patched: str) -> None:
    result = shell("run", patched, "--chat", *SHORT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "sites replaced" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["run", "PATCHED", "--recipe", "int8"], "has its recipe", id="run with another recipe"),
        pytest.param(["run", "PATCHED", "--compare"], "give the float checkpoint", id="run and compare"),
        pytest.param(["quantize", "PATCHED", "--out", "OUT"], "is a saved patched model", id="quantise again"),
        pytest.param(["quantize", "MODEL", "--out", "MODEL"], "name another folder", id="into its own folder"),
        pytest.param(["quantize", "MODEL", "--out", "MODEL/config.json"], "is a file", id="into a file"),
        pytest.param(["quantize", "MODEL", "--out", "OUT", "--max-shard-size", "5"], "max_shard_size", id="shard size"),
        pytest.param(["quantize", "MODEL", "--out", "OUT", "--recipe", "no_such"], "no_such", id="no such recipe"),
        pytest.param(["quantize", "/no/such/model", "--out", "OUT"], "/no/such/model", id="no such model"),
        pytest.param(["bench", "PATCHED"], "saved patched model", id="bench"),
    ],
)
def test_clear_errors(cli: Cli, model: str, patched: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    places = {"PATCHED": patched, "MODEL": model, "OUT": str(tmp_path / "out")}
    for word, place in places.items():
        arguments = [place + one.removeprefix(word) if one.startswith(word) else one for one in arguments]
    before = {path.name for path in Path(model).iterdir()}
    result = cli(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr.replace("\n", " ")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
    assert {path.name for path in Path(model).iterdir()} == before


def test_out_is_needed(cli: Cli, model: str) -> None:
    assert cli("quantize", model).exit_code == 2
