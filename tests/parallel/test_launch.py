"""The launcher of ranks: what it leaves behind in the process that calls it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from accelpatch.errors import PatchError
from accelpatch.parallel import launch


@pytest.mark.parametrize("status", [0, 3])
def test_signals_and_environment_are_as_before(status: int) -> None:
    handlers, environment = [signal.getsignal(number) for number in launch.TAKEN], dict(os.environ)
    words = [sys.executable, "-c", f"import os; raise SystemExit({status} + (os.environ['MARK'] != 'here'))"]
    if status:
        with pytest.raises(PatchError, match=f"rank 0 of 1 ended with status {status}"):
            launch.run(words, 1, {"MARK": "here"})
    else:
        launch.run(words, 1, {"MARK": "here"})
    assert [signal.getsignal(number) for number in launch.TAKEN] == handlers
    assert dict(os.environ) == environment
