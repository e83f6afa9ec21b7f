"""The text of an answer while its tokens arrive, and the reasons of an empty one."""

from __future__ import annotations

import pytest
import torch

from accelpatch.cli.generation import Answer, Stopped, TextStream

from .conftest import byte_tokenizer

TOKENIZER = byte_tokenizer()


def stream(text: str, *stops: str, interrupted_at: int | None = None) -> tuple[list[str], str]:
    """The pieces that are written of a text that arrives byte by byte, and how it ends."""
    pieces: list[str] = []
    counted = TextStream(TOKENIZER, pieces.append, stops, lambda: counted.count == interrupted_at)
    counted.put(torch.tensor([[1, 2, 3]]))  # the prompt
    try:
        for token in TOKENIZER(text)["input_ids"]:
            counted.put(torch.tensor([token]))
        counted.end()
    except Stopped as stopped:
        assert "".join(pieces) == counted.text
        return pieces, str(stopped)
    assert "".join(pieces) == counted.text
    return pieces, "end"


@pytest.mark.parametrize(
    ("text", "stops", "pieces", "ended"),
    [
        pytest.param("abc", [], ["a", "b", "c"], "end", id="none"),
        pytest.param("a\u00e9b", [], ["a", "\u00e9", "b"], "end", id="a character of two bytes"),
        pytest.param("ab###cd", ["###"], ["a", "b"], "stop", id="it is not printed"),
        pytest.param("a##b", ["###"], ["a", "##b"], "end", id="what only began as one is"),
        pytest.param("ab#", ["###"], ["a", "b", "#"], "end", id="also at the end"),
        pytest.param("aab", ["ab"], ["a"], "stop", id="a beginning within a beginning"),
        pytest.param("xyz", ["yz", "xy"], [], "stop", id="the first to be complete"),
    ],
)
def test_stops(text: str, stops: list[str], pieces: list[str], ended: str) -> None:
    assert stream(text, *stops) == (pieces, ended)


def test_an_interrupted_answer_keeps_what_was_said() -> None:
    assert stream("abcd", interrupted_at=2) == (["a", "b"], "interrupted")
    assert stream("ab##", "###", interrupted_at=4) == (["a", "b", "##"], "interrupted")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(Answer(" x", 2, "end", 1.0), None, id="an answer"),
        pytest.param(Answer("", 1, "end", 0.0), "the model ended at once", id="its end"),
        pytest.param(Answer("", 9, "length", 1.0), "its 9 tokens are special ones", id="special"),
        pytest.param(Answer("\n\n", 2, "end", 1.0), "its 2 tokens are blank", id="blank"),
        pytest.param(Answer("", 3, "stop", 1.0), "it begins with a --stop text", id="stop"),
        pytest.param(Answer("", 1, "interrupted", 0.0), "it was interrupted", id="interrupted"),
    ],
)
def test_why_an_answer_is_empty(answer: Answer, why: str | None) -> None:
    assert answer.empty_because() == why
