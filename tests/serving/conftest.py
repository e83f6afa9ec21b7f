"""One server for a file's tests, where the packages of the extra `serve` are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import byte_tokenizer, save_model
from tests.support.one_thread import _one_thread  # noqa: F401
from tests.support.serving import Running, running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose context takes a thousand tokens."""
    return save_model(tmp_path_factory.mktemp("serving") / "tiny", context=1024, tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, new_tokens=900) as one:
        yield one
