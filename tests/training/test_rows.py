"""Rows of JSON lines: what is read, and what is said of a bad one, with its line number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import LoadError
from accelpatch.training import puzzles, rows

GOOD = '{"prompt": "a", "completion": "b"}'
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]


def file_of(folder: Path, *lines: str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize(
    "row",
    [{"text": "a"}, {"prompt": "", "completion": "b"}, {"messages": TALK}],
    ids=["text", "prompt and completion", "messages"],
)
def test_the_three_forms(row: dict[str, Any], tmp_path: Path) -> None:
    found = rows.read(file_of(tmp_path, json.dumps(row | {"id": 7}), "", json.dumps(row)))
    assert [(one.line, one.values) for one in found] == [(1, row), (3, row)]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert rows.read(file_of(tmp_path, "\ufeff" + GOOD))[0].values["prompt"] == "a"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("{", "line 2: it is not JSON", id="cut off"),
        pytest.param("[1]", "line 2: it is no JSON object", id="a list"),
        pytest.param('{"prompt": NaN, "completion": "b"}', "NaN is no number of JSON", id="NaN"),
        pytest.param(
            '{"question": "a"}', "line 2: it has question; a row has text or prompt and completion", id="keys"
        ),
        pytest.param(
            '{"text": "a", "prompt": "a", "completion": "b"}', "line 2: it has completion, prompt, text", id="2"
        ),
        pytest.param('{"prompt": 1, "completion": "b"}', "line 2: prompt is 1, and must be text", id="a number"),
        pytest.param('{"prompt": "a", "completion": " "}', "line 2: completion is empty", id="empty"),
        pytest.param('{"prompt": "a", "completion": "\\ud800"}', "lone surrogate", id="half a character"),
        pytest.param('{"text": "a"}', "line 2: it has text, and line 1 has completion, prompt", id="another form"),
        pytest.param('{"messages": []}', "line 2: messages must be a list", id="no messages"),
        pytest.param('{"messages": [{"role": "boss", "content": "a"}]}', "line 2: message 1 is", id="a role"),
        pytest.param('{"messages": [{"role": "user", "content": "a"}]}', "nothing to learn", id="no answer"),
        pytest.param("[" * 100_000, "line 2: it is not JSON", id="deep"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as error:
        rows.read(file_of(tmp_path, GOOD, line))
    assert said in str(error.value)
    assert "rows.jsonl, line 2" in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD.encode() + b"\n\xff\n")
    with pytest.raises(LoadError, match="line 2: it is not UTF-8"):
        rows.read(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
def test_an_empty_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no rows"):
        rows.read(file_of(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        rows.read(tmp_path / "nothing")


def test_preferences(tmp_path: Path) -> None:
    file = file_of(tmp_path, '{"prompt": "a", "chosen": "b", "rejected": "c"}')
    assert rows.read(file, preferences=True)[0].values["rejected"] == "c"
    with pytest.raises(LoadError, match="line 1: it has prompt, rejected; a row has prompt, chosen and rejected"):
        rows.read(file_of(tmp_path, '{"prompt": "a", "rejected": "c"}'), preferences=True)


def test_held_out_rows_are_spread_and_apart() -> None:
    all_rows = [rows.Row(number, {"text": str(number)}) for number in range(100)]
    train, held_out = rows.split(all_rows, 0.1)
    assert [one.line for one in held_out] == list(range(0, 100, 10))
    assert len(train) == 90
    assert not {one.line for one in train} & {one.line for one in held_out}
    assert rows.split(all_rows, 0.0) == (all_rows, [])


def test_puzzles_are_right_and_those_held_out_are_not_trained_on() -> None:
    train, held_out = puzzles.as_rows()
    assert len({row.values["prompt"] for row in [*train, *held_out]}) == puzzles.ROWS + puzzles.HELD_OUT
    for row in [*train, *held_out]:
        kind, _, word = row.values["prompt"].partition(": ")
        given, answer = word.split(), row.values["completion"].split()
        if kind == "Sort":
            assert answer == sorted(given)
        elif kind == "Reverse":
            assert answer == given[::-1]
        else:
            assert [(ord(b) - ord(a)) % 26 for a, b in zip(given, answer, strict=True)] == [1, 1, 1]
    assert {row.values["prompt"].partition(":")[0] for row in held_out} == {"Next", "Reverse", "Sort"}
    assert puzzles.as_rows() == (train, held_out)


def test_puzzles_of_preference() -> None:
    train, _ = puzzles.as_rows(preferences=True)
    assert all(row.values["chosen"] != row.values["rejected"] for row in train)
