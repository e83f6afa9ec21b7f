"""accelpatch eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 12)  # 636 bytes and so tokens
    return str(file)


def test_exact_changes_nothing_that_counts(cli: Cli, model: str, text: str) -> None:
    found = json.loads(cli("eval", model, "--recipe", "exact", "--text", text, "--json").stdout)
    assert found["kl"] < 1e-6
    assert found["top1"] > 0.99
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=1e-4)
    assert found["tokens"] == 633  # windows of 256 tokens, the first of each is not predicted


def test_int4_costs_more_than_int8(cli: Cli, model: str, text: str) -> None:
    kl = [
        json.loads(cli("eval", model, "--recipe", recipe, "--text", text, "--json").stdout)["kl"]
        for recipe in ("int8", "int4")
    ]
    assert 0 < kl[0] < kl[1]


def test_table(cli: Cli, model: str, text: str) -> None:
    result = cli("eval", model, "--text", text, "--max-tokens", "100")
    for words in ("mean KL", "top-1 agreement", "perplexity", "99 predicted tokens"):
        assert words in result.stdout


def test_a_short_text_is_said(cli: Cli, model: str, text: str) -> None:
    result = cli("eval", model, "--recipe", "exact", "--text", text)
    assert result.exit_code == 0
    assert result.stderr == (
        f"warning: {text} has 636 tokens, and figures of fewer than 1000 say little: give a longer text, or none\n"
    )


def test_without_a_text_it_takes_the_one_that_is_shipped(cli: Cli, model: str) -> None:
    result = cli("eval", model, "--recipe", "exact", "--json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert "Wonderland (1865)" in found["text"]
    assert found["tokens"] > 3000  # of bytes; some 2,800 of SmolLM2's


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "holds no text; give another one", id="empty"),
        pytest.param(b"a", "at least 2", id="one token"),
        pytest.param(b"caf\xe9 au lait", "not UTF-8 text", id="latin-1"),
    ],
)
def test_texts_that_cannot_be_used(cli: Cli, model: str, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    result = cli("eval", model, "--text", str(file))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert words in result.stderr
