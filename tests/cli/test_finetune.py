"""accelpatch finetune, merge, and run and chat with --adapter, as a user calls them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelpatch.cli import console
from accelpatch.training import configuration
from accelpatch.training.folder import Folder
from tests.support import warm_python

from .conftest import Cli, Shell, environment

pytest.importorskip("trl", reason="TRL is not installed: pip install 'accelpatch[train]'")

FAST = ("--set", "schedule.max_steps=4", "--set", "batch.size=4", "--set", "checkpoint.every=1", "--set",
        "evaluation.answers=2", "--set", "evaluation.max_new_tokens=4")  # fmt: skip
SHORT = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"{one}+{one}=", "completion": str(2 * one)} for one in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def trained(
    model: str, data: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, subprocess.CompletedProcess[str]]:
    """The folder that the command writes, and what it printed, in a process of its own."""
    out = tmp_path_factory.mktemp("trained") / "sums"
    command = ["finetune", model, "--data", data, "--recipe", "train", "--out", str(out), *FAST]
    done = warm_python.run(["-m", "accelpatch", *command], timeout=120)
    assert done.returncode == 0, done.stderr
    return str(out), done


@pytest.mark.smoke
def test_what_it_prints(trained: tuple[str, subprocess.CompletedProcess[str]]) -> None:
    out, done = trained
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names == ["model", "steps", "loss", "held-out loss", "exact match", "time", "peak memory", "folder"]
    assert f"--adapter {out} --prompt" in done.stdout
    said = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert said[0].startswith("held-out answers that are exact, before training: ")
    assert said[1].startswith("step 1 of 4: loss ")
    assert said[-2].startswith("step 4 of 4: evaluation loss ")
    assert len(said) == 7, done.stderr  # no warnings, no bars


def test_run_with_adapters(cli: Cli, trained: tuple[str, Any], model: str, tmp_path: Path) -> None:
    out = trained[0]
    document = json.loads(cli("run", model, "--recipe", "exact", "--adapter", out, "--json", *SHORT).stdout)
    assert list(document["adapters"]) == ["sums"]
    assert document["adapters"]["sums"]["answer"] == document["answer"]
    shutil.copytree(out, tmp_path / "other")
    printed = cli("run", model, "--adapter", out, "--adapter", str(tmp_path / "other"), "--compare", *SHORT).stdout
    assert [line for line in printed.splitlines() if line.startswith("---")] == [
        "--- original", "--- adapter sums", "--- adapter other"
    ]  # fmt: skip


def test_run_without_an_adapter_there(cli: Cli, model: str, tmp_path: Path) -> None:
    result = cli("run", model, "--adapter", str(tmp_path), *SHORT)
    assert result.exit_code == 1
    assert "holds no adapter" in result.stderr
    assert cli("run", model, "--adapter", "nowhere").exit_code == 2


def test_chat_takes_another_adapter(cli: Cli, trained: tuple[str, Any], model: str) -> None:
    result = cli("chat", model, "--adapter", trained[0], *SHORT, input="/adapter sums\n/adapter two\nHello\n")
    assert "(answers are those of the adapter sums from here on)" in result.stderr
    assert "no adapter is called 'two': there are sums" in result.stderr


def test_merge(cli: Cli, trained: tuple[str, Any], model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "merged")
    assert cli("merge", model, "--adapter", trained[0], "--out", out).exit_code == 0
    options = ("--recipe", "exact", "--prompt", "3+3=", "--json", *SHORT)
    apart = json.loads(cli("run", model, "--adapter", trained[0], *options).stdout)
    assert json.loads(cli("run", out, *options).stdout)["answer"] == apart["answer"] != ""
    again = cli("merge", model, "--adapter", trained[0], "--out", out)
    assert (again.exit_code, "is not empty" in again.stderr) == (1, True)
    assert "give --adapter DIR" in cli("merge", model, "--out", str(tmp_path / "x")).stderr


def test_an_adapter_is_no_model(cli: Cli, trained: tuple[str, Any]) -> None:
    result = cli("run", trained[0])
    assert result.exit_code == 1
    assert f"run its model with --adapter {trained[0]}" in result.stderr


def test_list_and_show(shell: Shell) -> None:
    listed = shell("finetune", "--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(configuration.bundled())
    shown = yaml.safe_load(shell("finetune", "--show", "qlora").stdout)
    assert (shown["recipe"], shown["adapter"]["rank"]) == ("train", 16)
    assert len(shown["data"]) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--config", "lorra"), "no bundled configuration is called 'lorra'; did you mean 'lora'?"),
        (("--set", "batch.sise=2"), "did you mean 'batch.size'?"),
        (("--recipe", "int9"), "no bundled recipe is called 'int9'"),
        (("--recipe", "int8", "--set", "recipe=int4"), "is given by an option and by --set"),
        (("no-such-folder/model",), "no-such-folder/model"),
    ],
)
def test_wrong_words(words: tuple[str, ...], said: str, cli: Cli, model: str, data: str, tmp_path: Path) -> None:
    named = () if words[0].endswith("model") else (model,)
    result = cli("finetune", *named, *words, "--data", data, "--out", str(tmp_path / "out"))
    assert (result.exit_code, said in result.stderr) == (1, True), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_bad_line_is_named(cli: Cli, model: str, data: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(Path(data).read_text() + "{oops\n")
    result = cli("finetune", model, "--data", str(bad), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "bad.jsonl, line 31: it is not JSON" in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_packages(cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.training import prepare

    monkeypatch.setattr(prepare, "_installed", lambda name: name != "trl")
    result = cli("finetune", model, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "fine-tuning needs trl; install what it needs with: pip install 'accelpatch[train]'" in result.stderr


def test_an_interrupt_says_what_is_kept(
    cli: Cli, model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def interrupted(text: str) -> None:
        said.append(text)
        if text.startswith("step 3"):
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "note", interrupted)
    out = str(tmp_path / "out")
    assert cli("finetune", model, "--data", data, "--out", out, *FAST).exit_code == 130
    assert said[-1] == f"interrupted; the checkpoint of step 2 is kept in {out}. The same command goes on from there"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_was_stopped_goes_on(
    how: signal.Signals, cli: Cli, trained: tuple[str, Any], model: str, data: str, tmp_path: Path
) -> None:
    """In a process of its own, stopped after its first checkpoint; it ends with the loss of one that was not."""
    out = tmp_path / "out"
    words = ["finetune", model, "--data", data, "--recipe", "train", "--out", str(out), *FAST]
    command = [sys.executable, "-m", "accelpatch", *words]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        until = time.monotonic() + 400  # of which a busy machine takes more than 100 for the imports and the patch
        while not (whole := Folder(out).whole()) and time.monotonic() < until and one.poll() is None:
            time.sleep(0.01)
        os.kill(one.pid, how)
        _, said = one.communicate(timeout=60)
    assert whole or one.returncode == 0, f"no checkpoint before the signal: {said[-500:]}"
    if one.returncode == 0:
        pytest.skip("it ended before the signal came")
    if how == signal.SIGINT:
        assert one.returncode == 130
        assert "is kept in" in said
        assert "The same command goes on from there" in said
    again = cli(*words)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.startswith("going on from step ")
    due, found = (json.loads((Path(folder) / "result.json").read_text()) for folder in (trained[0], out))
    for key in ("loss", "eval_loss"):
        assert found[key] == pytest.approx(due[key], rel=1e-2)
