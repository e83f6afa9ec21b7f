"""accelpatch cache."""

from __future__ import annotations

import json

import pytest

from accelpatch import cache

from .conftest import Cli

pytestmark = pytest.mark.usefixtures("own_cache")


def _fill() -> None:
    cache.publish("models", "first", lambda folder: (folder / "weights").write_bytes(bytes(1000)) and None)
    cache.publish("kernels", "second", lambda folder: (folder / "library").write_bytes(bytes(500)) and None)


def test_empty(cli: Cli) -> None:
    result = cli("cache", "list")
    assert result.exit_code == 0
    assert "0 entries" in result.stdout


def test_list(cli: Cli) -> None:
    _fill()
    text = cli("cache", "list").stdout
    assert "first" in text
    assert "1.0 kB" in text
    assert "2 entries, 1.5 kB" in text


def test_list_as_json(cli: Cli) -> None:
    _fill()
    found = json.loads(cli("cache", "list", "--json").stdout)
    assert found["root"] == str(cache.root())
    assert {(e["kind"], e["key"], e["bytes"]) for e in found["entries"]} == {
        ("models", "first", 1000),
        ("kernels", "second", 500),
    }


def test_clear_one_kind(cli: Cli) -> None:
    _fill()
    assert cli("cache", "clear", "models").stdout == "freed 1.0 kB\n"
    assert [entry.key for entry in cache.listing()] == ["second"]


def test_clear_all(cli: Cli) -> None:
    _fill()
    assert json.loads(cli("cache", "clear", "--json").stdout) == {"freed_bytes": 1500}
    assert cache.listing() == []


def test_clear_no_such_kind(cli: Cli) -> None:
    _fill()
    result = cli("cache", "clear", "model")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the cache has no entries of kind 'model'; it has: kernels, models")
