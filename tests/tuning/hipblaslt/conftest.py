"""Searches in this process, which has torch and pymoo loaded already: the children cost seconds each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from accelpatch.tuning.hipblaslt import balancer, job
from tests.cli.conftest import cli  # noqa: F401


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each job where it would be started; how children are handled is test_balancer.py's."""

    def spread(
        work: Mapping[str, float], devices: Sequence[str], command: Callable[[str, str], Sequence[str]], logs: Path,
        **options: Any,
    ) -> balancer.Spread:  # fmt: skip
        made = balancer.Spread()
        for place, name in enumerate(sorted(work, key=lambda one: -work[one])):
            device, said = devices[place % len(devices)], io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = job.main([*command(name, device)][3:])
            with (logs / f"device_{device}.log").open("a") as file:
                file.write(said.getvalue())
            if status == 0:
                made.done.append(name)
            elif status == job.LOST:
                made.lost[device] = said.getvalue()
                made.left.append(name)
            else:
                made.failed[name] = said.getvalue().splitlines()[-1]
        return made

    monkeypatch.setattr(balancer, "spread", spread)
