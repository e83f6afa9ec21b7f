"""Finds out that a rank of a job has ended or failed, and ends the others with its name instead of letting them hang.

Every rank counts up a number in the job's store from a thread of its own, and reads the others'. A collective that
waits for a rank that is gone cannot be interrupted from Python (a kernel of NCCL spins on the device), so the process
is ended: standard error says which rank was lost.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# seconds: between beats; without one (a rank may compile, or import, meanwhile); to end by an error; at the end
BEAT, STALE, GRACE, LAST = 1.0, 15.0, 5.0, 5.0


class Watchdog:
    """rank, world: of this process. store: a client of the job's store that no other thread uses.

    lost: what happened to a rank that is gone, None while all are there. A rank that raises an error and lives on has
    failed: that ends the others' present attempt alone, by an error, or the process where it waits for that rank.
    """

    def __init__(self, store: Any, rank: int, world: int):
        self._store, self._rank, self._world = store, rank, world
        self._lock = threading.Lock()
        self._seen = {other: (-1, time.monotonic()) for other in range(world) if other != rank}
        self._ended = threading.Event()
        self.lost: str | None = None
        self._attempt, self._inside = 0, False
        self._host = f"{socket.gethostname()} {_boot()}"
        self._pids: dict[int, int] = {}  # of the other ranks on this machine
        store.set(f"process/{rank}", f"{os.getpid()} {self._host}")
        self._since = 0.0  # when a rank was found to be lost, or to have failed
        self._thread = threading.Thread(target=self._run, name="accelpatch watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context manager: an attempt that all ranks make together; an error in it is said to the others."""
        with self._lock:
            self._attempt, self._inside, self._since = self._attempt + 1, True, 0.0
        try:
            yield
        except BaseException as error:
            self._say(f"failed/{self._attempt}/{self._rank}", first_line(error))
            raise
        finally:
            self._inside = False

    def end(self, *, by: str | None = None) -> None:
        """Say that this rank ends, and wait a little for the others to have seen it. by: why, if not by itself."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        by = by or (None if error is None else first_line(error))
        self._say(f"done/{self._rank}", by or "")
        until = time.monotonic() + LAST
        try:
            while time.monotonic() < until and self.lost is None and not all(map(self._has_ended, self._seen)):
                time.sleep(0.05)
        except RuntimeError:
            return

    def gone(self, *, within: float = 0.0) -> str | None:
        """What happened to another rank, as it is found out within so many seconds; None where nothing has."""
        until = time.monotonic() + within
        while True:
            with self._lock:
                found = self.lost or self._found()
            if found is not None or time.monotonic() >= until:
                return found
            time.sleep(0.05)

    def _say(self, key: str, text: str) -> None:
        try:
            with self._lock:
                self._store.set(key, text)
        except RuntimeError:  # the store is gone, and with it who would read this
            return

    def _found(self) -> str | None:
        """What another rank said of itself."""
        try:
            for other in self._seen:
                for key, what in ((f"failed/{self._attempt}/{other}", "failed"), (f"done/{other}", "has ended")):
                    if self._store.check([key]):
                        text = self._store.get(key).decode()
                        return f"rank {other} {what}{f': {text}' if text else ''}"
        except RuntimeError as error:
            return f"the job's store is gone, which rank 0 or torchrun holds ({first_line(error)})"
        return None

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            with self._lock:
                said = self._found()
                self._look()
            now = time.monotonic()
            if self.lost is None and not (said and self._inside):
                self._since = 0.0
                continue
            self._since = self._since or now
            if now - self._since > GRACE:
                print(f"accelpatch: rank {self._rank} ends: {self.lost or said}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> None:
        now = time.monotonic()
        try:
            self._store.add(f"beat/{self._rank}", 1)
            for other, (count, since) in self._seen.items():
                present = self._store.add(f"beat/{other}", 0)
                self._seen[other] = (present, now if present != count else since)
                ended = self._store.check([f"done/{other}"])
                if ended and (text := self._store.get(f"done/{other}").decode()):
                    self.lost = f"rank {other} has ended: {text}"
                elif not ended and self._is_dead(other):
                    self.lost = f"rank {other} has ended: its process is gone, without a word"
                elif not ended and now - self._seen[other][1] > STALE:
                    self.lost = f"rank {other} has ended or is stuck: it gave no sign for {STALE:.0f} s"
        except RuntimeError as error:
            self.lost = f"the job's store is gone, which rank 0 or torchrun holds ({first_line(error)})"

    def _has_ended(self, other: int) -> bool:
        return self._is_dead(other) or bool(self._store.check([f"done/{other}"]))

    def _is_dead(self, other: int) -> bool:
        """Whether the process of a rank on this machine is no more."""
        if other not in self._pids:
            if not self._store.check([f"process/{other}"]):
                return False
            pid, _, host = self._store.get(f"process/{other}").decode().partition(" ")
            self._pids[other] = int(pid) if host == self._host else 0
        return self._pids[other] > 0 and _is_gone(self._pids[other])


def _is_gone(pid: int) -> bool:
    """Whether there is no process of this number, or one that has ended and whose parent has not asked."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return Path("/proc/self/stat").exists()  # without /proc nothing is known


def _boot() -> str:
    """A name of this machine, or container, that no other has."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with its class where it is no error of accelpatch's."""
    text = (str(error).splitlines() or [""])[0]
    return text if type(error).__module__.startswith("accelpatch.") else f"{type(error).__name__}: {text}"
