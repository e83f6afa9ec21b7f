"""Progress bars: on a terminal, in no log, by the user's own function, and none where none are wanted."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils import logging

import accelpatch
from accelpatch import progress
from accelpatch.errors import ArgumentError
from tests.support.tiny import CAUSAL


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def patched(**options: Any) -> Any:
    return accelpatch.patch(CAUSAL["llama"].make(), "int8", **options)


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, act: Callable[[], Any]) -> str:
    """What `act` writes on stderr."""
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    act()
    return stream.getvalue()


@pytest.mark.parametrize("options", [{}, {"progress": True}])
def test_a_terminal_gets_a_bar_for_each_stage_that_is_gone_at_the_end(options: Any, monkeypatch: Any) -> None:
    text = shown(monkeypatch, Terminal(), lambda: patched(**options))
    for stage in ("capture", "build and verify", "verify fused", "check"):
        assert stage in text
    assert not text.rsplit("\r", 1)[1].strip("\x1b[A\n ")


def test_a_log_gets_none(monkeypatch: Any) -> None:
    assert shown(monkeypatch, io.StringIO(), patched) == ""


def test_none_where_none_are_wanted(monkeypatch: Any) -> None:
    assert shown(monkeypatch, Terminal(), lambda: patched(progress=False)) == ""


def test_none_where_those_of_transformers_are_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", False)
    assert shown(monkeypatch, Terminal(), patched) == ""


def test_the_users_own_function_gets_all_and_no_bar_is_drawn(monkeypatch: Any) -> None:
    reports: list[tuple[str, int, int]] = []
    assert shown(monkeypatch, Terminal(), lambda: patched(progress=lambda *said: reports.append(said))) == ""
    ends = {stage for stage, done, total in reports if done == total}
    assert ends >= {"capture", "build and verify", "check"}


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentError, match="progress is 3; it is a function"):
        patched(progress=3)


def test_a_stage_that_starts_again_gets_a_new_bar(monkeypatch: Any) -> None:
    def twice() -> None:
        with progress.bars() as advance:
            for done in (1, 2, 1, 2):
                advance("again", done, 2)

    text = shown(monkeypatch, Terminal(), twice)
    assert text.count("\ragain:   0%") == 2
