"""accelpatch recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelpatch.recipe import recipe

from .conftest import Cli


def test_list(cli: Cli) -> None:
    lines = cli("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe.bundled())
    assert all(len(line.split()) > 5 for line in lines)


def test_list_as_json(cli: Cli) -> None:
    listed = json.loads(cli("recipes", "--json").stdout)
    assert [item["name"] for item in listed] == list(recipe.bundled())


@pytest.mark.parametrize("name", recipe.bundled())
def test_show_parses_back(cli: Cli, name: str) -> None:
    shown = cli("recipes", "show", name).stdout
    assert recipe.dump(recipe.parse(shown)) == recipe.dump(recipe.load(name))


def test_show_a_file_that_extends(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndescription: nothing but another name\nextends: int8\n")
    shown = cli("recipes", "show", str(file)).stdout
    assert "name: mine" in shown
    assert "extends" not in shown
    assert "int8_weight_only" in shown
