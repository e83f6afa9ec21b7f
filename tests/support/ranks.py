"""Runs jobs of several ranks for tests: one process imports everything once, and forks the ranks of every job.

A job is a function of jobs.py's kind: it runs on each rank, and gives what the test looks at.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULE = "tests.support.rank_jobs"
START, MOST = 120.0, 60.0  # seconds of the imports on a busy machine, and of a job
LONGER = {"eight": 600.0}  # and of those that need more: all ranks share the machine's cores
STOPPED = {"stuck": (1,)}  # job -> ranks that stop for good, and are ended when the others have


@dataclass(frozen=True)
class Ended:
    """How a job ended. results: what each rank gave, or the text of its error; None for one that gave nothing.

    statuses: of the processes, negative for a signal. errors: what each wrote to standard error. seconds: of the job.
    """

    results: list[Any]
    statuses: list[int]
    errors: list[str]
    seconds: float


def run(folder: Path, jobs: Sequence[tuple[str, int]]) -> dict[str, Ended]:
    """Run (name of a job, number of ranks), one after the other, in a process of its own; name -> how it ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    given = [str(folder), *(f"{name}:{world}" for name, world in jobs)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ranks", *given], cwd=ROOT, env=environment, text=True,
        capture_output=True, check=False, timeout=START + sum(LONGER.get(name, MOST) for name, _ in jobs),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Ended] = {}
    for name, _ in jobs:
        found[name] = pickle.loads((folder / f"{name}.ended").read_bytes())
    return found


def _job(folder: Path, name: str, world: int) -> Ended:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    begun = time.monotonic()
    pids = [_forked(folder, name, rank, world, port) for rank in range(world)]
    statuses = [0] * world
    left = dict(zip(pids, range(world), strict=True))
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            statuses[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - begun > LONGER.get(name, MOST) or set(left.values()) <= set(STOPPED.get(name, ())):
            for pid in left:
                os.kill(pid, 9)
        else:
            time.sleep(0.02)
    results = [_read(folder / f"{name}.{rank}") for rank in range(world)]
    errors = [(folder / f"{name}.{rank}.err").read_text() for rank in range(world)]
    return Ended(results, statuses, errors, time.monotonic() - begun)


def _read(file: Path) -> Any:
    return pickle.loads(file.read_bytes()) if file.is_file() else None


def _forked(folder: Path, name: str, rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(os.open(folder / f"{name}.{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        result = getattr(importlib.import_module(MODULE), name)(rank, world)
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException as error:  # noqa: BLE001 - the fork must not go on as its parent does
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        traceback.print_exc()
        sys.last_exc = error  # type: ignore[attr-defined]  # as the interpreter does with one that nobody caught
    finally:
        import atexit

        atexit._run_exitfuncs()
        os._exit(status)


def _main(folder: Path, jobs: Sequence[str]) -> None:
    importlib.import_module(MODULE).warm()
    for job in jobs:
        name, _, world = job.partition(":")
        ended = _job(folder, name, int(world))
        (folder / f"{name}.ended").write_bytes(pickle.dumps(ended))


if __name__ == "__main__":
    from tests.support import ranks  # by whose name the results are read

    ranks._main(Path(sys.argv[1]), sys.argv[2:])
