"""One GEMM's search, in a process of its own: a configuration in, trials.jsonl, result.json and a library logic out.

What was measured is written down trial by trial, so that a process which was killed goes on when it is started again.
One whose command was killed ends after its trial, and the next one waits for that.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

from . import platforms
from .configuration import Configuration, read
from .search import Outcome, best_of, search
from .space import Choice, key_of
from .work import Work, write

TRIALS, RESULT = "trials.jsonl", "result.json"
LOST = 3  # the exit status where the device, and not the job, is at fault


class TrialLog:
    """The trials of a search, one a line of JSON. A last line that was cut off does not count."""

    def __init__(self, file: Path):
        self._file = file
        self.known: dict[str, Outcome] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            try:
                one = json.loads(line)
                if not one["failed"]:
                    self.known[one["choice"]] = Outcome(one["us"], one["reason"])
            except (ValueError, KeyError, TypeError):
                continue
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            with file.open("a", encoding="utf-8") as stream:
                stream.write("\n")

    def add(self, choice: Choice, outcome: Outcome) -> None:
        """Write down a trial."""
        line = {
            "choice": key_of(choice),
            "us": outcome.microseconds,
            "reason": outcome.reason,
            "failed": outcome.failed,
        }
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


class Orphaned(Exception):
    """The command that started this process has ended."""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context manager: no other process searches for the same GEMM meanwhile."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(work: Work, name: str, platform: platforms.Platform, *, trials: int, seed: int) -> Mapping[str, Any]:
    """Search for one GEMM of a tuning, and write down what was found. Returns the contents of result.json.

    Raises AccelpatchError where no choice could run.
    """
    found, folder = read(work.folder / "tunings" / f"{name}.yaml"), work.part("tunings", f"build_{name}")
    with _alone(folder):
        return _run(work, name, platform, found, folder, trials=trials, seed=seed)


def _run(
    work: Work, name: str, platform: platforms.Platform, found: Configuration, folder: Path, *, trials: int, seed: int
) -> Mapping[str, Any]:
    gemm, log, parent = platforms.gemm_of(work, name), TrialLog(folder / TRIALS), os.getppid()

    def measure(choice: Choice) -> Outcome:
        if os.getppid() != parent:
            raise Orphaned
        outcome = platform.measure(gemm, choice, found, folder)
        log.add(choice, outcome)
        took = outcome.reason if outcome.microseconds is None else f"{outcome.microseconds:.3f} us"
        print(f"{name}: {platform.said}: {key_of(choice)}: {took}", flush=True)
        return outcome

    first = platform.reference(gemm, found)
    made = search(found.space, measure, trials=trials, seed=seed, first=first, known=log.known)
    best = best_of(made)
    if best is None:
        why = made[-1].outcome.reason if made else "there is none"
        raise AccelpatchError(f"{name}: none of {len(made)} choices could run; the last: {why}")
    platform.keep(gemm, best, found, folder)
    result = {
        "name": name, "platform": platform.name, "trials": len(made), "choices": found.space.size,
        "us": best.outcome.microseconds, "choice": {one: best.choice[one] for one in found.space.values},
    }  # fmt: skip
    write(folder / RESULT, json.dumps(result, indent=1))
    return result


def main(words: list[str]) -> int:
    """The program: a search's arguments in, an exit status out."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("folder", "name", "platform", "device", "hipblaslt"):
        parser.add_argument(f"--{option}", default="")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    try:
        platform = platforms.make(given.platform, device=given.device, hipblaslt=given.hipblaslt)
    except AccelpatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST
    try:
        result = run(Work(Path(given.folder)), given.name, platform, trials=given.trials, seed=given.seed)
    except Orphaned:
        return 1
    except AccelpatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.name}: {platform.said}: best {result['us']:.3f} us after {result['trials']} trials", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
