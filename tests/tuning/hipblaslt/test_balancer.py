"""Searches on several devices: what a crash, a hang and a lost device cost, and what an interrupt leaves."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from accelpatch.tuning.hipblaslt import balancer

#: stands for a search: it crashes, hangs or finds no device, as its name and its device say
JOB = """
import os, sys, time
from pathlib import Path
folder, job, device = sys.argv[1:]
with Path(folder, "order").open("a") as file:
    file.write(f"{job} {device}\\n")
print("search of", job, flush=True)
if "crash" in job:
    os.abort()
if "fail" in job:
    sys.exit("error: no kernel")
if device == "9":
    print("error: no GPU 9", file=sys.stderr)
    sys.exit(3)
if "hang" in job:
    time.sleep(60)
time.sleep(0.05)
"""


def _spread(tmp_path: Path, work: dict[str, float], devices: Sequence[str], seconds: float = 20.0) -> balancer.Spread:
    def command(job: str, device: str) -> list[str]:
        return [sys.executable, "-S", "-c", JOB, str(tmp_path), job, device]

    return balancer.spread(work, devices, command, tmp_path, seconds=seconds)


def _order(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "order").read_text().splitlines()]


def test_the_largest_comes_first(tmp_path: Path) -> None:
    made = _spread(tmp_path, {"small": 1, "large": 9, "middle": 5}, ["0"])
    assert made.done == ["large", "middle", "small"]
    assert [job for job, _ in _order(tmp_path)] == ["large", "middle", "small"]


def test_each_device_works_and_has_a_log(tmp_path: Path) -> None:
    made = _spread(tmp_path, {f"job{n}": 1 for n in range(12)}, ["0", "1"])
    assert sorted(made.done) == sorted(f"job{n}" for n in range(12))
    assert {device for _, device in _order(tmp_path)} == {"0", "1"}
    for device in "01":
        said = (tmp_path / f"device_{device}.log").read_text()
        mine = [job for job, where in _order(tmp_path) if where == device]
        assert [line.split()[-1] for line in said.splitlines() if line.startswith("search of")] == mine


def test_a_crash_a_failure_and_a_hang_cost_their_job_alone(tmp_path: Path) -> None:
    made = _spread(tmp_path, {"crash": 4, "hang": 3, "fail": 2, "good": 1}, ["0"], seconds=2)
    assert made.done == ["good"]
    assert made.failed == {
        "crash": "it was ended by SIGABRT", "hang": "it did not end within 2 s, and was killed", "fail": "no kernel",
    }  # fmt: skip
    assert not made.lost
    assert not made.left


def test_a_lost_device_gives_its_job_to_another(tmp_path: Path) -> None:
    made = _spread(tmp_path, {f"job{n}": 1 for n in range(4)}, ["9", "0"])
    assert sorted(made.done) == [f"job{n}" for n in range(4)]
    assert made.lost == {"9": "no GPU 9"}
    assert not made.failed


def test_where_every_device_is_lost_the_jobs_are_left(tmp_path: Path) -> None:
    made = _spread(tmp_path, {"a": 2, "b": 1}, ["9"])
    assert (made.done, made.left, made.lost) == ([], ["a", "b"], {"9": "no GPU 9"})


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = balancer.spread({"a": 1}, ["0"], lambda job, device: ["/no/such"], tmp_path, seconds=5)
    assert made.failed == {"a": "it cannot be started (No such file or directory)"}


def test_an_interrupt_ends_the_children(tmp_path: Path) -> None:
    started = time.monotonic()

    def interrupt() -> None:
        while not (tmp_path / "order").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _spread(tmp_path, {"hang": 1, "next": 0.5}, ["0"], seconds=50)
    thread.join()
    assert time.monotonic() - started < 20
    assert [job for job, _ in _order(tmp_path)] == ["hang"]
