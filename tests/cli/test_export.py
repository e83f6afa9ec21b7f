"""accelpatch export: what is printed, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli, Shell

RECIPE = """name: int4-symmetric
extends: int4
rules:
  - name: linear
    options: {symmetric: true}
"""


@pytest.fixture(scope="module")
def patched(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to export, with a tokenizer."""
    from typer.testing import CliRunner

    from accelpatch.cli import app

    folder = tmp_path_factory.mktemp("quantised")
    (folder / "recipe.yaml").write_text(RECIPE)
    arguments = ["quantize", model, "--recipe", str(folder / "recipe.yaml"), "--out", str(folder / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    return str(folder / "out")


def test_one_table_and_nothing_else(shell: Shell, patched: str, tmp_path: Path) -> None:
    result = shell("export", patched, "--to", "gptq", "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names[:4] == ["format", "quantised", "weights", "folder"]
    assert "is int8 in the source and float here" in result.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"config.json", "model.safetensors", "quantize_config.json", "tokenizer.json"}
    assert "recipe.yaml" not in files


def test_json_and_shards(cli: Cli, patched: str, tmp_path: Path) -> None:
    arguments = ("--to", "compressed-tensors", "--out", str(tmp_path / "out"), "--max-shard-size", "50KB", "--json")
    document = json.loads(cli("export", patched, *arguments).stdout)
    assert document["format"] == "pack-quantized"
    assert document["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").glob("model-*-of-*.safetensors"))


def test_run_answers_as_the_source(cli: Cli, patched: str, tmp_path: Path) -> None:
    assert cli("export", patched, "--to", "awq", "--out", str(tmp_path / "out")).exit_code == 0
    due, found = (json.loads(cli("run", place, "--json", "--max-new-tokens", "8").stdout)["answer"]
                  for place in (patched, str(tmp_path / "out")))  # fmt: skip
    assert found == due != ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["MODEL", "--to", "gptq"], "holds float weights", id="float"),
        pytest.param(["/no/such/model", "--to", "gptq"], "/no/such/model", id="no such folder"),
        pytest.param(["PATCHED", "--to", "gptq", "--out", "PATCHED"], "is not empty", id="into its own folder"),
        pytest.param(["PATCHED", "--to", "gptq", "--max-shard-size", "5"], "max_shard_size", id="shard size"),
    ],
)
def test_clear_errors(cli: Cli, model: str, patched: str, arguments: list[str], words: str) -> None:
    places = {"PATCHED": patched, "MODEL": model}
    result = cli("export", *(places.get(one, one) for one in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr.replace("\n", " ")
    assert result.stdout == ""


def test_an_unknown_format_is_a_usage_error(cli: Cli, patched: str) -> None:
    result = cli("export", patched, "--to", "exl2")
    assert result.exit_code == 2
    assert "compressed-tensors" in result.stderr
    assert cli("export", patched).exit_code == 2
