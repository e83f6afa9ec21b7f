"""Rows of a fine-tuning data set: JSON lines, checked one by one, so that what is wrong is said with its line number.

A row has `text`, or `prompt` and `completion`, or `messages`; for DPO `prompt`, `chosen` and `rejected`. All rows of a
file have the same form. Loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError

FORMS = {"text": ("text",), "prompt and completion": ("prompt", "completion"), "messages": ("messages",)}
PREFERENCES = {"prompt, chosen and rejected": ("prompt", "chosen", "rejected")}
ROLES = ("system", "user", "assistant", "tool")
MAX_HELD_OUT = 200


@dataclass(frozen=True)
class Row:
    """One row with the number of its line, from 1, in the file that it comes from. values: column -> its value."""

    line: int
    values: Mapping[str, Any]


def read(file: Path, *, preferences: bool = False) -> list[Row]:
    """The rows of a file. preferences: rows of DPO. Raises LoadError, naming the line, for what cannot be used."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise LoadError(f"{file} cannot be read ({error.strerror}): name a file of JSON lines") from None
    forms = PREFERENCES if preferences else FORMS
    found: list[Row] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            found.append(Row(number, _row(line, f"{file}, line {number}", forms)))
            if set(found[-1].values) != set(found[0].values):
                raise LoadError(
                    f"{file}, line {number}: it has {_listed(found[-1].values)}, and line {found[0].line} has "
                    f"{_listed(found[0].values)}; all rows of a file have one form"
                )
    if not found:
        raise LoadError(f"{file} holds no rows: give a file with a JSON object a line, of {' or '.join(forms)}")
    return found


def from_memory(given: Sequence[Mapping[str, Any]], *, preferences: bool = False) -> list[Row]:
    """Rows that a program gives, checked as those of a file are; their numbers are their places, from 1."""
    forms = PREFERENCES if preferences else FORMS
    return [Row(place, _checked(dict(one), f"row {place}", forms)) for place, one in enumerate(given, 1)]


def split(rows: Sequence[Row], held_out: float) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on: of each stretch of the file some, at most MAX_HELD_OUT."""
    count = min(MAX_HELD_OUT, int(len(rows) * held_out))
    places = {place * len(rows) // count for place in range(count)} if count else set()
    return [row for at, row in enumerate(rows) if at not in places], [rows[at] for at in sorted(places)]


def _row(line: bytes, where: str, forms: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise LoadError(f"{where}: it is not UTF-8 text ({error.reason} at byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{where}: it is not JSON ({error}); write one JSON object a line") from None
    if not isinstance(row, dict):
        raise LoadError(f'{where}: it is no JSON object; a row looks like {{"prompt": ..., "completion": ...}}')
    return _checked(row, where, forms)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _checked(row: dict[str, Any], where: str, forms: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The columns of the row that are used; others are left out."""
    fitting = [keys for keys in forms.values() if all(key in row for key in keys)]
    if len(fitting) != 1:
        have = _listed(row) if row else "nothing"
        raise LoadError(f"{where}: it has {have}; a row has {' or '.join(forms)}")
    for key in fitting[0]:
        if key == "messages":
            _check_messages(row[key], where)
        elif not isinstance(row[key], str):
            raise LoadError(f"{where}: {key} is {row[key]!r:.40}, and must be text")
        elif key != "prompt" and not row[key].strip():
            raise LoadError(f"{where}: {key} is empty, so there is nothing to learn from it")
        elif not _encodes(row[key]):
            raise LoadError(f"{where}: {key} holds half of a character (a lone surrogate), which no tokenizer takes")
    return {key: row[key] for key in fitting[0]}


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise LoadError(f"{where}: messages must be a list that is not empty")
    for place, one in enumerate(messages, 1):
        if not (isinstance(one, dict) and isinstance(one.get("content"), str) and one.get("role") in ROLES):
            raise LoadError(
                f"{where}: message {place} is {one!r:.60}; it has a role ({', '.join(ROLES)}) and content, a text"
            )
        if not _encodes(one["content"]):
            raise LoadError(f"{where}: message {place} holds half of a character (a lone surrogate)")
    if messages[0]["role"] == "assistant" or not any(one["role"] == "assistant" for one in messages):
        raise LoadError(f"{where}: there is nothing to learn without a message and the assistant's answer to it")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(keys: Mapping[str, Any]) -> str:
    names = [f"{key:.30}" for key in sorted(keys)]
    return ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
