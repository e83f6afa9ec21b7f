"""Spreads searches over devices: the largest first, one at a time on each device, every one a child process.

A child that crashes or hangs costs its own job: it is named, and the device takes the next. A device on which a child
cannot begin is given up, and the others do its work.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelpatch.tuning.children import kill, why_ended

from .job import LOST

Progress = Callable[[str, int, int], None]


@dataclass
class Spread:
    """What came of the jobs. done: those that ended well. failed: job -> why it did not. lost: device -> why it was
    given up. left: jobs that no device was left for."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@dataclass
class _Jobs:
    """The jobs that wait, shared by the devices' threads."""

    waiting: list[str]
    total: int
    report: Progress
    made: Spread = field(default_factory=Spread)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> str | None:
        with self.lock:
            return self.waiting.pop(0) if self.waiting and not self.stopped else None

    def again(self, job: str, device: str, why: str) -> None:
        with self.lock:
            self.waiting.insert(0, job)
            self.made.lost[device] = why

    def ended(self, job: str, why: str | None) -> None:
        with self.lock:
            if why is None:
                self.made.done.append(job)
            else:
                self.made.failed[job] = why
            self.report("optimize", len(self.made.done) + len(self.made.failed), self.total)


def spread(
    work: Mapping[str, float], devices: Sequence[str], command: Callable[[str, str], Sequence[str]], logs: Path, *,
    seconds: float, progress: Progress | None = None, environment: Callable[[str], Mapping[str, str]] | None = None,
) -> Spread:  # fmt: skip
    """Run a command for each job on some device, and wait for all of them.

    work: job -> how much it is, in any unit. command: of a job on a device. logs: a folder, in it one file a device,
    `device_N.log`. seconds: the limit of one job. environment: all variables of a device's children; None: this
    process's own. An interrupt ends the children and goes on to the caller.
    """
    jobs = _Jobs(sorted(work, key=lambda name: -work[name]), len(work), progress or (lambda *_: None))
    threads = [
        threading.Thread(target=_serve, args=(device, jobs, command, logs, seconds, environment), daemon=True)
        for device in dict.fromkeys(devices)
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.2)
    finally:
        jobs.stopped = True
        with jobs.lock:
            running = list(jobs.running)
        for child in running:
            kill(child)
    jobs.made.left = list(jobs.waiting)
    return jobs.made


def _serve(
    device: str, jobs: _Jobs, command: Callable[[str, str], Sequence[str]], logs: Path, seconds: float,
    environment: Callable[[str], Mapping[str, str]] | None,
) -> None:  # fmt: skip
    """Take jobs for one device until none is left, or the device is lost."""
    while (job := jobs.next()) is not None:
        status, said = _run(job, command(job, device), jobs, logs / f"device_{device}.log", seconds,
                            environment(device) if environment else None)  # fmt: skip
        if status == LOST:
            jobs.again(job, device, said)
            return
        jobs.ended(job, said if status else None)


def _run(
    job: str, command: Sequence[str], jobs: _Jobs, log: Path, seconds: float, environment: Mapping[str, str] | None
) -> tuple[int, str]:
    """The exit status of a job and, where it is not 0, why. What it prints goes to the end of the log."""
    try:
        with log.open("ab") as out:
            start = out.seek(0, 2)
            out.write(f"== {job} {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            out.flush()
            child = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return 1, f"it cannot be started ({error.strerror or error})"
    with jobs.lock:
        jobs.running.add(child)
    try:
        status = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return 1, f"it did not end within {seconds:g} s, and was killed"
    finally:
        kill(child)
        with jobs.lock:
            jobs.running.discard(child)
    return status, why_ended(status, _tail(log, start)) if status else ""


def _tail(log: Path, start: int, most: int = 1 << 16) -> str:
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - most))
        return stream.read().decode("utf-8", "replace")
