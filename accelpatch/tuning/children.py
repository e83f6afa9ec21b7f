"""Runs a command in a child process with a time limit: what hangs or crashes there costs that command alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

ACCELPATCH = (sys.executable, "-m", "accelpatch")
LAST_WORDS = 200  # characters of a failed child's last line that are shown


def run_json(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """The JSON object that a command prints on stdout, or why there is none: it hung, crashed, failed or said no such.

    seconds: after so many it is killed, with all processes that it started. environment: variables besides this
    process's own.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        try:
            status = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s, and was killed"
        finally:
            kill(child)
        out.seek(0)
        errors.seek(0)
        return _answer(status, out.read(), errors.read())


def kill(child: subprocess.Popen[Any]) -> None:
    """Kill a child that was started in a session of its own, with the processes that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def why_ended(status: int, said: str) -> str:
    """How a child with this exit status failed. said: what it wrote on stderr."""
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = (errors or lines or [f"it ended with status {status}"])[-1]
    return last if len(last) <= LAST_WORDS else f"{last[: LAST_WORDS - 3]}..."


def _answer(status: int, printed: str, said: str) -> dict[str, Any] | str:
    if status != 0:
        return why_ended(status, said)
    try:
        answer = json.loads(printed[printed.index("{") :])
    except ValueError:
        return "it printed no JSON"
    assert isinstance(answer, dict)
    return answer
