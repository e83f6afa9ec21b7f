"""accelpatch calibrate, and what the other commands do with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelpatch.checkpoints.statistics import load

from .conftest import Cli, Shell

SHORT = ("--max-new-tokens", "4")
SMALL = ("--samples", "4", "--length", "64")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. Ein schöner Tag. " * 8)
    return str(file)


@pytest.fixture(scope="module")
def statistics(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file that the command writes."""
    from typer.testing import CliRunner

    from accelpatch.cli import app

    out = tmp_path_factory.mktemp("statistics") / "out.safetensors"
    result = CliRunner().invoke(app, ["calibrate", model, "--data", text, "--out", str(out), *SMALL])
    assert result.exit_code == 0, result.stderr
    return str(out)


def test_one_table_and_nothing_else(shell: Shell, model: str, text: str, tmp_path: Path) -> None:
    result = shell("calibrate", model, "--data", text, "-o", "out.safetensors", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    for name in ("model", "text", "tokens", "linear layers", "statistics"):
        assert names.count(name) == 1
    assert "--statistics out.safetensors" in " ".join(result.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.parametrize("given", [True, False], ids=["a-text", "the-models-own"])
def test_json(cli: Cli, model: str, text: str, tmp_path: Path, given: bool) -> None:
    out = tmp_path / "out.safetensors"
    data = ("--data", text) if given else ()
    document = json.loads(cli("calibrate", model, *data, "--out", str(out), *SMALL, "--json").stdout)
    assert document == {"model": model, "file": str(out), "tokens": 4 * 64, "sites": 14}
    found = load(out)
    assert (found.tokens, len(found.sites)) == (256, 14)


@pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant-static"])
def test_run_with_the_statistics(cli: Cli, model: str, statistics: str, recipe: str) -> None:
    options = ("--recipe", recipe, "--statistics", statistics, "--json", *SHORT)
    document = json.loads(cli("run", model, *options).stdout)
    assert document["recipe"] == recipe
    report = document["report"]
    assert sum(site["replacer"] == "w8a8" for site in report["sites"]) == 14
    assert not any("wrote itself" in note for note in report["notes"])
    kinds = {site["kernel"].rpartition(", ")[2] for site in report["sites"] if site["replacer"] == "w8a8"}
    assert kinds == {"dynamic"} if recipe == "smoothquant" else kinds <= {"dynamic", "static"}


def test_without_statistics_the_model_writes_its_own_text(cli: Cli, model: str) -> None:
    report = json.loads(cli("run", model, "--recipe", "smoothquant", "--json", *SHORT).stdout)["report"]
    assert any("calibrated on 4096 tokens that the model wrote itself" in note for note in report["notes"])


def test_eval_with_the_statistics(cli: Cli, model: str, statistics: str, text: str) -> None:
    options = ("--recipe", "smoothquant", "--statistics", statistics, "--text", text, "--json")
    found = json.loads(cli("eval", model, *options).stdout)
    assert 0 < found["kl"] < 0.05


def test_quantize_with_the_statistics_and_run_what_it_wrote(
    cli: Cli, model: str, statistics: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    options = ("--recipe", "smoothquant", "--statistics", statistics)
    assert cli("quantize", model, *options, "--out", out).exit_code == 0
    due = json.loads(cli("run", model, *options, "--json", *SHORT).stdout)
    found = json.loads(cli("run", out, "--json", *SHORT).stdout)
    assert found["answer"] == due["answer"] != ""
    assert found["recipe"] == "smoothquant"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["calibrate", "MODEL", "--out", "no/such/folder/f"], "name another file", id="folder"),
        pytest.param(["calibrate", "BARE", "--data", "TEXT", "--out", "OUT"], "tokenizer", id="no tokenizer"),
        pytest.param(["calibrate", "MODEL", "--data", "SHORT", "--out", "OUT"], "32 are the least", id="short text"),
        pytest.param(["calibrate", "MODEL", "--data", "LATIN", "--out", "OUT"], "not UTF-8", id="latin-1"),
        pytest.param(["calibrate", "no/such/model", "--out", "OUT"], "no/such/model", id="no such model"),
        pytest.param(["run", "MODEL", "--recipe", "smoothquant", "--statistics", "TEXT"], "cannot be read", id="run"),
        pytest.param(["eval", "MODEL", "--recipe", "smoothquant", "--statistics", "TEXT", "--text", "TEXT"],
                     "cannot be read", id="eval"),
        pytest.param(["quantize", "MODEL", "--recipe", "smoothquant", "--statistics", "TEXT", "--out", "OUT"],
                     "cannot be read", id="quantize"),
    ],
)  # fmt: skip
def test_clear_errors(
    cli: Cli, model: str, bare_model: str, text: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait " * 9)
    places = {"MODEL": model, "BARE": bare_model, "TEXT": text, "OUT": str(tmp_path / "out"),
              "SHORT": str(tmp_path / "short.txt"), "LATIN": str(tmp_path / "latin.txt")}  # fmt: skip
    result = cli(*(places.get(one, one) for one in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"short.txt", "latin.txt"}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["calibrate", "MODEL"], id="no out"),
        pytest.param(["calibrate", "MODEL", "--out", "OUT", "--data", "no/such/file"], id="no such data"),
        pytest.param(["calibrate", "MODEL", "--out", "OUT", "--samples", "0"], id="no samples"),
        pytest.param(["run", "MODEL", "--recipe", "smoothquant", "--statistics", "no/such/file"], id="no statistics"),
    ],
)
def test_usage(cli: Cli, model: str, tmp_path: Path, arguments: list[str]) -> None:
    places = {"MODEL": model, "OUT": str(tmp_path / "out")}
    assert cli(*(places.get(one, one) for one in arguments)).exit_code == 2
    assert list(tmp_path.iterdir()) == []
