"""accelpatch quantize, and accelpatch run on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli, Shell

SHORT = ("--max-new-tokens", "8")
FILES = {"README.md", "config.json", "generation_config.json", "recipe.yaml", "model.safetensors", "tokenizer.json",
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
        pytest.param(["quantize", "MODEL", "--out", "MODEL", "--overwrite"], "name another folder", id="into itself"),
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


def test_over_a_model_of_its_own(cli: Cli, model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder will do
    assert cli("quantize", model, "--out", str(out)).exit_code == 0
    for name in ("notes.md", "model.md"):
        (out / name).write_text("mine")
    refused = cli("quantize", model, "--recipe", "int4", "--out", str(out))
    assert refused.exit_code == 1
    assert "give --overwrite" in refused.stderr
    assert "name: int8" in (out / "recipe.yaml").read_text()
    assert cli("quantize", model, "--recipe", "int4", "--out", str(out), "--overwrite").exit_code == 0
    assert "name: int4" in (out / "recipe.yaml").read_text()
    assert {path.name for path in out.iterdir()} == FILES | {"notes.md", "model.md"}


def test_an_interrupt_says_what_is_kept_and_the_next_run_goes_on(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelpatch.checkpoints.resume import Store

    kept, stock = 5, Store._keep
    out, made = tmp_path / "out", [0]

    def keep(self: Store, *arguments: object) -> None:
        stock(self, *arguments)  # type: ignore[arg-type]
        made[0] += 1
        if made[0] == kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "_keep", keep)
    stopped = cli("quantize", model, "--out", str(out))
    assert stopped.exit_code == 130
    assert f"interrupted; {out} is as it was. 5 finished weights are kept in" in stopped.stderr
    assert "the same command goes on from there" in stopped.stderr
    assert not out.exists()
    made[0] = kept  # the rest is made, and nothing interrupts
    finished = cli("quantize", model, "--out", str(out))
    assert finished.exit_code == 0
    assert f"going on: {kept} finished weights of an interrupted run are in" in finished.stderr
    assert made[0] == 15
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_before_the_first_weight(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("accelpatch.api.quantize", interrupted)
    stopped = cli("quantize", model, "--out", str(tmp_path / "out"))
    assert stopped.exit_code == 130
    assert "No weight was finished" in stopped.stderr


def test_what_is_printed_is_not_read_as_no_loss(cli: Cli, model: str, tmp_path: Path) -> None:
    printed = cli("quantize", model, "--recipe", "int4", "--out", str(tmp_path / "out")).stdout
    assert "agreement 100" not in printed
    assert "generate() beside the quantised modules: KL" in printed
    assert "not measured, for the original was not loaded: accelpatch eval" in printed
    assert "of SmolLM2-135M-Instruct with int4 it is KL 0.39 nats, top-1 agreement 67.9%" in printed


def test_a_method_and_a_text(cli: Cli, model: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    out, data = str(tmp_path / "out"), str(tmp_path / "text.txt")
    options = ("--bits", "4", "--data", data, "--samples", "4", "--length", "64", "--out", out, "--json")
    result = cli("quantize", model, "--method", "gptq+awq", *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["report"]["recipe"] == "int4-gptq-awq"
    assert not [note for note in document["report"]["notes"] if "wrote itself" in note]
    saved = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "rounding: gptq" in saved
    assert "samples: 4" in saved
    assert cli("run", out, *SHORT).exit_code == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (("--method", "best"), "no method is called 'best'"),
        (("--bits", "5"), "no recipe has weights of 5 bits"),
        (("--bits", "4", "--recipe", "int8"), "give one of the two"),
        (("--recipe", "exact", "--method", "gptq"), "exact has no linear layers that gptq makes"),
        (("--bits", "4", "--samples", "4"), "int4 does not calibrate"),
        (("--bits", "4", "--method", "gptq", "--data", "absent.txt"), "absent.txt"),
    ],
)
def test_methods_that_cannot_be(cli: Cli, model: str, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    result = cli("quantize", model, *options, "--out", str(tmp_path / "out"))
    assert result.exit_code != 0
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_bits_within_a_budget(cli: Cli, model: str, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    text = tmp_path / "text.txt"
    text.write_text("The sea is wide and the ship is small, said the captain. " * 40)
    options = ("--budget", "5.2bits", "--data", str(text))
    result = cli("quantize", model, *options, "--method", "rtn", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    written = (out / "recipe.yaml").read_text()
    assert written.startswith("# Chosen: ")
    assert "8-bits" in written
    assert "statistics or data were given" not in result.stdout
    assert cli("run", str(out), *SHORT).exit_code == 0
    assert cli("quantize", model, "--recipe", str(out / "recipe.yaml"), "--out", str(again)).exit_code == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "again", "text.txt"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--budget", "small"], "such as 4.5bits", id="no number"),
        pytest.param(["--budget", "2bits"], "below the", id="below the smallest format"),
    ],
)
def test_a_budget_that_cannot_be(cli: Cli, model: str, tmp_path: Path, options: list[str], words: str) -> None:
    result = cli("quantize", model, *options, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert words in result.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_budget_and_bits_contradict_each_other(cli: Cli, model: str, tmp_path: Path) -> None:
    result = cli("quantize", model, "--budget", "5bits", "--bits", "4", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "a budget chooses" in result.stderr.replace("\n", " ")
