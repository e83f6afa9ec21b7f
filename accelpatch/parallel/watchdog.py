"""Finds out that a rank of a job has ended or failed, and ends the others with its name instead of letting them hang.

Every rank counts up a number in the job's store from a thread of its own, and reads the others'. A collective that
waits for a rank that is gone cannot be interrupted from Python (a kernel of NCCL spins on the device), so the process
is ended: standard error says which rank was lost.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

BEAT, STALE, GRACE, LAST = 1.0, 15.0, 5.0, 5.0  # seconds: between beats; without one; to end by an error; at the end


class Watchdog:
    """rank, world: of this process. store: a client of the job's store that no other thread uses."""

    def __init__(self, store: Any, rank: int, world: int):
        self._store, self._rank, self._world = store, rank, world
        self._seen = {other: (-1, time.monotonic()) for other in range(world) if other != rank}
        self._ended = threading.Event()
        self.lost: str | None = None  # what happened to another rank
        self._lost_at = 0.0
        self._thread = threading.Thread(target=self._run, name="accelpatch watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def fail(self, message: str) -> None:
        """Say to the other ranks that this one failed."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            try:
                self._store.set(f"failed/{self._rank}", message)
            except RuntimeError:  # the store is gone, and with it who would read this
                return

    def end(self) -> None:
        """Say that this rank ends by itself, and wait a little for the others to have seen it."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self._store.set(f"done/{self._rank}", "1")
            until = time.monotonic() + LAST
            while time.monotonic() < until and not all(self._gone(other) for other in self._seen):
                time.sleep(0.05)
        except RuntimeError:
            return

    def name_lost(self, within: float) -> str | None:
        """What happened to another rank, as it is found out within so many seconds; None where nothing has."""
        until = time.monotonic() + within
        while self.lost is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.lost

    def _gone(self, other: int) -> bool:
        return bool(self._store.check([f"done/{other}"]) or self._store.check([f"failed/{other}"]))

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                self._look()
            except RuntimeError as error:
                self._lose(f"the job's store is gone, which rank 0 or torchrun holds ({_first_line(error)})")
            if self.lost is not None and time.monotonic() - self._lost_at > GRACE:
                print(f"accelpatch: rank {self._rank} ends: {self.lost}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> None:
        self._store.add(f"beat/{self._rank}", 1)
        now = time.monotonic()
        for other, (count, since) in self._seen.items():
            present = self._store.add(f"beat/{other}", 0)
            self._seen[other] = (present, now if present != count else since)
            if self._store.check([f"failed/{other}"]):
                message = self._store.get(f"failed/{other}").decode()
                self._lose(f"rank {other} failed: {message}")
            elif now - self._seen[other][1] > STALE and not self._store.check([f"done/{other}"]):
                self._lose(f"rank {other} has ended or is stuck: it gave no sign for {STALE:.0f} s")

    def _lose(self, what: str) -> None:
        if self.lost is None:
            self.lost, self._lost_at = what, time.monotonic()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
