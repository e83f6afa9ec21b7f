"""docs/tuning.md: its commands run, on a tiny model in the place of the default one; its keys and options exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._inductor
import yaml

from accelpatch.kernels import dispatch, measured
from accelpatch.kernels.ops.attention import stored
from accelpatch.recipe import recipe as recipes
from accelpatch.tuning import children
from tests.cli.conftest import Cli, byte_tokenizer, cli, environment, save_model  # noqa: F401
from tests.support import gemm_logs

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
#: what makes the commands of the page short
SHORT = {
    "auto": ("--recipes", "int8", "--prompt", "8", "--new", "8", "--repeats", "1", "--tokens", "32"),
    "kernels": ("--rows", "1,3"),
}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def _commands() -> list[list[str]]:
    inline = re.findall(r"`(accelpatch tune trial [^`]*)`", PAGE)
    lines = [line for block in _blocks("sh") for line in block.splitlines()] + inline
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture(autouse=True)
def _reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the tiny model in it, and a cache of the test's own beside the one that kernels are built in."""
    save_model(tmp_path / "smollm2-135m", tokenizer=byte_tokenizer())
    (tmp_path / "hipblaslt.log").write_text(gemm_logs.GUIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured, "KIND", "kernels-of-the-page")
    monkeypatch.setattr(stored, "KIND", "attention-of-the-page")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    yield
    from accelpatch import cache

    cache.clear(measured.KIND)
    cache.clear(stored.KIND)
    measured.forget()
    stored.orders_of.cache_clear()
    dispatch.forget()


def _marks(words: list[str]) -> Any:
    """Searches without a list of recipes take half a minute each."""
    return pytest.mark.nightly if words[1] == "auto" and "--recipes" not in words else ()


@pytest.mark.parametrize("words", [pytest.param(one, id=" ".join(one), marks=_marks(one)) for one in _commands()])
def test_its_commands(words: list[str], cli: Cli) -> None:  # noqa: F811
    if words[0] == "run":  # of the recipe that the line before it writes
        Path("mine.yaml").write_text("extends: int8")
    short = SHORT.get(words[1], ()) if "--recipes" not in words else ("--repeats", "1", "--tokens", "32")
    result = cli(*[word.replace("smollm2-135m", "./smollm2-135m") for word in words], *short)
    if words[1] == "tunableop" and not torch.cuda.is_available():
        assert "a build for the CPU" in result.stderr or "no driver of a GPU" in result.stderr
        return
    assert result.exit_code == 0, result.output
    if words[1] == "auto":
        file = Path(words[words.index("--out") + 1] if "--out" in words else "tuned.yaml")
        assert recipes.load(file).name in ("tuned-int8", "tuned-exact")
        assert "KL" in file.read_text().partition("rules:")[0]
    if words[1] == "hipblaslt" and "64" in words:
        assert result.stdout.strip() == _blocks("text")[0].strip()
    if words[1] == "kernels":
        assert "stored; `accelpatch cache clear" in result.stdout


def test_bounds_that_nothing_meets(cli: Cli) -> None:  # noqa: F811
    result = cli("tune", "auto", "./smollm2-135m", "--max-gb", "0.00001", *SHORT["auto"])
    assert result.exit_code == 1
    assert "int8: it takes" in result.stderr
    assert "no recipe is written" in result.stderr
    assert not Path("tuned.yaml").exists()


def test_a_trial_that_hangs_is_killed_and_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    hanging = "import sys, time\nif '--recipe' in sys.argv: time.sleep(600)\nfrom accelpatch.cli import main\nmain()"
    monkeypatch.setattr(children, "ACCELPATCH", (sys.executable, "-c", hanging))
    result = cli("tune", "auto", "./smollm2-135m", "--budget", "12", *SHORT["auto"])
    assert result.exit_code == 1
    assert re.search(r"int8: it did not end within [\d.]+ s, and was killed", result.stdout)
    assert not Path("tuned.yaml").exists()


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_its_recipes(text: str) -> None:
    assert recipes.parse(text).runtime == recipes.load(yaml.safe_load(text)).runtime


def test_its_options_are_inductors() -> None:
    table = PAGE.partition("| option | what it does |")[2]
    names = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    known: Any = torch._inductor.config.get_config_copy()
    assert len(names) == 10
    assert [name for name in names if name not in known] == []
