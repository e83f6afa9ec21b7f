"""Tunes the GEMMs that a run recorded, in child processes: one a device, each GEMM with a time limit.

Each result is written at once to a file next to `out`, so that an interrupted call goes on. A child that crashes or
hangs costs the GEMM that it had; the next one gets a new child.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError
from accelpatch.runtime.tuned_gemms import TunedGemms
from accelpatch.tuning.children import kill, why_ended

WORKER = (sys.executable, "-m", "accelpatch.tuning.gemm_worker")
START = 120.0  # seconds that a child has to load torch
RECORD: Mapping[str, str] = {  # the variables by which torch records the GEMMs of a process
    "PYTORCH_TUNABLEOP_ENABLED": "1",
    "PYTORCH_TUNABLEOP_TUNING": "0",
    "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "1",
}
UNTUNED = "PYTORCH_TUNABLEOP_UNTUNED_FILENAME"
RESULTS = "PYTORCH_TUNABLEOP_FILENAME"


@dataclass
class Progress:
    """What is known of each GEMM. validators: of the process that tuned them. results: GEMM -> its lines. failed: GEMM
    -> why it has none. lost: device -> why it was given up."""

    validators: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def tuned(self) -> TunedGemms:
        """All results as a file."""
        lines = dict.fromkeys(line for found in self.results.values() for line in found)
        return TunedGemms(self.validators, tuple(sorted(lines)))


def untuned_in(folder: Path) -> list[str]:
    """The GEMMs that torch recorded in the files of a folder, each once, in their order."""
    files = sorted(folder.glob("*untuned*.csv"))
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("Validator")))


def partial_file(out: Path) -> Path:
    """Where the finished GEMMs of an interrupted call lie."""
    return out.with_name(f".{out.name}.partial")


def tune(
    gemms: Sequence[str], devices: Sequence[str], out: Path, *, seconds: float, worker: Sequence[str] = WORKER,
    progress: Callable[[str, int, int], None] | None = None,
) -> Progress:  # fmt: skip
    """Tune these GEMMs on these devices (indices, as torch counts them) and write `out`.

    seconds: the limit of one GEMM. worker: the command of a child. Raises AccelpatchError where every device is lost,
    and for unfinished work of another release; the results so far then stay in the file next to `out`.
    """
    made, log = _resumed(partial_file(out)), partial_file(out)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gemm in gemms:
        if gemm not in made.results and gemm not in made.failed:
            jobs.put(gemm)
    state = _State(made, log, len(gemms), progress or (lambda *_: None))
    threads = [
        threading.Thread(target=_serve, args=(name, jobs, state, seconds, tuple(worker)), daemon=True)
        for name in dict.fromkeys(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [gemm for gemm in gemms if gemm not in made.results and gemm not in made.failed]
    if left:
        why = "; ".join(f"device {name}: {reason}" for name, reason in made.lost.items())
        raise AccelpatchError(
            f"{len(left)} of {len(gemms)} GEMMs are not tuned ({why}): run the command again to go on"
        )
    out.write_text(made.tuned().text(), encoding="utf-8")
    log.unlink(missing_ok=True)
    return made


def _resumed(log: Path) -> Progress:
    """What an interrupted call had done. A last line that was cut off does not count."""
    made = Progress()
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return made
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        made.validators |= one.get("validators", {})
        if "results" in one:
            made.results[one["gemm"]] = one["results"]
        elif "failed" in one:
            made.failed[one["gemm"]] = one["failed"]
    return made


@dataclass
class _State:
    made: Progress
    log: Path
    total: int
    report: Callable[[str, int, int], None]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def validate(self, found: Mapping[str, str]) -> str | None:
        """Take a child's validators; returns why not where unfinished work has others."""
        with self.lock:
            if not self.made.validators:
                self.made.validators = dict(found)
                self._write({"validators": dict(found)})
            if self.made.validators == found:
                return None
            return f"{self.log} was begun with another release or device: remove it to begin anew"

    def done(self, gemm: str, answer: Mapping[str, Any]) -> None:
        with self.lock:
            if "results" in answer:
                self.made.results[gemm] = list(answer["results"])
            else:
                self.made.failed[gemm] = str(answer["failed"])
            self._write({"gemm": gemm, **answer})
            self.report("tune", len(self.made.results) + len(self.made.failed), self.total)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _serve(name: str, jobs: queue.SimpleQueue[str], state: _State, seconds: float, worker: Sequence[str]) -> None:
    """Tune on one device until nothing is left, or no child starts there."""
    child: _Child | None = None
    try:
        while True:
            if child is None:
                if jobs.empty():
                    return
                child = _Child(worker, name)
                if (reason := _greeted(child, state)) is not None:
                    state.made.lost[name] = reason
                    return
            try:
                gemm = jobs.get_nowait()
            except queue.Empty:
                return
            answer = child.ask(gemm, seconds)
            if isinstance(answer, str):
                child.close()
                child, answer = None, {"failed": answer}
            state.done(gemm, answer)
    finally:
        if child is not None:
            child.close()


def _greeted(child: _Child, state: _State) -> str | None:
    """Why a child that was just started cannot tune; None where it can."""
    hello = child.answer(START)
    if isinstance(hello, str):
        return hello
    return str(hello["error"]) if "error" in hello else state.validate(hello["validators"])


class _Child:
    """A child process on one device, which answers each line with one."""

    def __init__(self, command: Iterable[str], device: str):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        shown = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        seen = shown.split(",") if shown else []
        one = seen[int(device)].strip() if int(device) < len(seen) else device
        visible = {"CUDA_VISIBLE_DEVICES": one, "HIP_VISIBLE_DEVICES": one}
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True, env={**os.environ, **visible},
        )  # fmt: skip
        self._text = ""

    def ask(self, line: str, seconds: float) -> dict[str, Any] | str:
        """The answer to a line, or why there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any] | str:
        """The next line of JSON, or why there is none. What else libraries print is left out."""
        out, end = self._process.stdout, time.monotonic() + seconds
        assert out is not None
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            while True:
                line, found, rest = self._text.partition("\n")
                if found:
                    self._text = rest
                    if line.startswith("{"):
                        return dict(json.loads(line))
                    continue
                if not ready.select(max(0.0, end - time.monotonic())):
                    return f"it did not end within {seconds:g} s, and was killed"
                if not (more := os.read(out.fileno(), 65536)):
                    return self._ended()
                self._text += more.decode(errors="replace")

    def _ended(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        return why_ended(status, self._errors.read())

    def close(self) -> None:
        """Kill it."""
        kill(self._process)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
