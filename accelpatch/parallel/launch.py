"""Starts the ranks of a tensor-parallel command on this machine, by torchrun's own launcher, as one command.

Rank 0 has the console; what the others write goes to files, of which the last line is shown where one of them fails.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelpatch.errors import PatchError

ENDING = 10  # seconds that ranks get to end by themselves once one of them has failed
TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that torch's launcher handles
STARTED = "ACCELPATCH_RANKS"  # set in the ranks that `run` starts


def run(command: Sequence[str], ranks: int, environment: Mapping[str, str]) -> None:
    """Run a program's command line once a rank, and return when all have ended. environment: added to the present one.

    Signals and environment are afterwards as before: torch's launcher keeps the handlers that it sets.

    Raises PatchError with the number of a rank that failed; none is running any more then.
    """
    given = {**environment, STARTED: str(ranks), **_threads(ranks)}
    before = {name: os.environ.get(name) for name in (*given, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    handlers = {number: signal.getsignal(number) for number in TAKEN}
    os.environ.update(given)
    try:
        with tempfile.TemporaryDirectory(prefix="accelpatch-ranks-") as folder:
            _launch(command, ranks, folder)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: not one of Python's
                    signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _launch(command: Sequence[str], ranks: int, folder: str) -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the error says what happened
    others: Any = dict.fromkeys(range(1, ranks), Std.ALL)
    config = LaunchConfig(
        1, 1, ranks, run_id="accelpatch", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{_free_port()}",
        rdzv_configs={"rank": 0}, max_restarts=0, logs_specs=DefaultLogsSpecs(folder, redirects=others),
        local_addr="127.0.0.1", **_patience(),
    )  # fmt: skip
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = _last_line(Path(folder), rank)
        how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with status {failure.exitcode}"
        raise PatchError(f"rank {rank} of {ranks} ended {how}{f': {said}' if said else ''}") from None
    except SignalException as error:
        raise KeyboardInterrupt from error


def _patience() -> dict[str, Any]:
    """How long a launcher of this torch waits before it kills what is left; older ones have their own time."""
    known = getattr(LaunchConfig, "__dataclass_fields__", {})
    return {"shutdown_timeout": ENDING} if "shutdown_timeout" in known else {}


def _threads(ranks: int) -> dict[str, str]:
    """On a CPU each rank's share of the cores, unless the user's environment says how many threads to take."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _last_line(folder: Path, rank: int) -> str:
    """The last line that a rank wrote to standard error; "" for rank 0, whose lines are on the console."""
    files = sorted(folder.glob(f"**/{rank}/stderr.log"))
    lines = files[-1].read_text(errors="replace").split("\n") if files and rank else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("error: ")


def this_program() -> list[str]:
    """The command line that runs accelpatch in this Python."""
    return [sys.executable, "-m", "accelpatch"]
