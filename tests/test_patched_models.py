"""docs/patched-models.md: each row of its table is run, in each format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

from tests.support import call_rows, module_rows, weight_rows
from tests.support.packed import FORMS, patch
from tests.support.rows import ROWS, RUN, stock


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_every_row_is_run() -> None:
    assert {one.__module__ for one in RUN.values()} == {one.__name__ for one in (call_rows, module_rows, weight_rows)}
    assert len(ROWS) == len(set(ROWS)) > 30
    assert sorted(RUN) == sorted(ROWS)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, form: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(is_gradient_checkpointing|weights were written).*")
        RUN[name](patch(stock(form), form), form, tmp_path)
