"""accelpatch bench kernel: a user's implementation beside torch's, on small weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelpatch.bench import linear_kernels, read_limit
from tests.support import plugins

from .conftest import Cli

PLUGIN = """
import accelpatch, torch
@accelpatch.implementation("linear", name="mine", why_not=lambda spec, device: None)
def mine(x, w, bias=None):
    return torch.nn.functional.linear(x, w, bias) * FACTOR
@accelpatch.implementation("linear", name="elsewhere", why_not=lambda spec, device: "it is for another machine")
def elsewhere(x, w, bias=None): ...
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    monkeypatch.setattr(read_limit, "last_level_cache", lambda: 0)
    monkeypatch.setattr(linear_kernels, "last_level_cache", lambda: 0)
    yield
    plugins.forget()


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "plugin.py").write_text(PLUGIN.replace("FACTOR", "1"))
    return tmp_path / "plugin.py"


def test_a_line_for_each_and_a_reason_for_those_that_cannot(cli: Cli, plugin: Path) -> None:
    done = cli("bench", "kernel", str(plugin), "--shapes", "64x32, 48x64", "--device", "cpu", "--rows", "2")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    timed = [(" ".join(line[:3]), line[3], line[4]) for line in lines if line[1:2] == ["x"] and line[0].isdigit()]
    assert timed == [(shape, "2", name) for shape in ("64 x 32", "48 x 64") for name in ("torch", "mine")]
    assert all(line[-1].endswith("%") for line in lines if line[0] in ("64", "48"))
    assert "not timed  elsewhere: it is for another machine" in done.stdout
    assert "not timed  hip: it runs on a GPU" in done.stdout
    assert "read limit  " in done.stdout


def test_the_shapes_of_a_model(cli: Cli, plugin: Path, model: str) -> None:
    done = cli("bench", "kernel", str(plugin), "--shapes", model, "--device", "cpu", "--dtype", "bfloat16", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    mine = [one for one in found if one["implementation"] == "mine"]
    assert len({(one["n"], one["k"]) for one in mine}) == len(mine) >= 4
    for one in mine:
        assert one["bytes_per_second"] == pytest.approx(2 * one["n"] * one["k"] / one["seconds"])


def test_a_wrong_one_is_not_timed(cli: Cli, plugin: Path) -> None:
    plugin.write_text(PLUGIN.replace("FACTOR", "1.01"))
    done = cli("bench", "kernel", str(plugin), "--shapes", "64x32", "--device", "cpu")
    assert done.exit_code == 1
    assert "WRONG  mine: error " in done.stdout
    assert "is over the bound" in done.stdout
    assert "64 x 32  1     mine" not in done.stdout


def test_files_and_shapes_that_will_not_do(cli: Cli, plugin: Path) -> None:
    done = cli("bench", "kernel", str(plugin), "--shapes", "64x0", "--device", "cpu")
    assert done.exit_code == 1
    assert "64x0" in done.stderr
    plugin.write_text("import accelpatch\n@accelpatch.implementation('rmsnorm', name='mine')\ndef mine(*args): ...\n")
    plugins.forget()
    done = cli("bench", "kernel", str(plugin), "--shapes", "64x32", "--device", "cpu")
    assert done.exit_code == 1
    assert "adds no implementation of linear: decorate one" in done.stderr
