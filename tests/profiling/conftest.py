"""Times that other processes on the machine cannot stretch; a GPU's are those of the clock."""

from __future__ import annotations

import time

import pytest
import torch

from accelpatch.bench import timing


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "perf_counter", time.process_time)
