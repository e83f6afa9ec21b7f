"""Tensor parallel on two GPUs by NCCL and over peer memory: a split model beside the whole one, in captured steps."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_rank_jobs import CASES, NEW, WAYS

ROOT = Path(__file__).parents[2]
RANKS = 2
LIMIT = 540  # seconds of a job: on a fresh machine its kernels are compiled first
APART = 2e-5  # of logits in float32, relative to the largest
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")]


def ended(job: str, folder: Path) -> tuple[list[int], list[str], float]:
    """Statuses, what the ranks wrote to standard error, and seconds of a job whose ranks nobody watches."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    given = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    begun = time.monotonic()
    files = [folder / f"{rank}.errors" for rank in range(RANKS)]  # a full pipe would stop the rank that is read last
    ranks = []
    for rank, file in enumerate(files):
        with file.open("w") as errors:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.gpu_rank_jobs", job, str(folder)], cwd=ROOT, stderr=errors,
                    env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )  # fmt: skip
    try:
        for process in ranks:
            process.wait(timeout=LIMIT)
    finally:
        for process in ranks:
            process.kill()
    seconds = time.monotonic() - begun
    return [process.returncode for process in ranks], [file.read_text() for file in files], seconds


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    statuses, errors, _ = ended("alike", folder)
    assert statuses == [0] * RANKS, errors
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_like_the_whole(found: list[dict[str, Any]], way: str, case: str) -> None:
    if isinstance(found[0][way], str):
        pytest.skip(found[0][way])
    every = [one[way][case] for one in found]
    assert every[0]["apart"] < APART
    assert every[0]["tokens"] == every[0]["due"]
    for one in every:
        assert one["bits"] == every[0]["bits"]
        assert one["tokens"] == one["again"] == every[0]["tokens"]
        assert one["captured"] == 2 * (NEW - 1), one["paths"]
    assert "(nccl" in every[0]["report"]
    assert ("one-shot" in every[0]["report"]) == (way != "nccl")
    assert ("one-shot push" in every[0]["report"]) == (way == "push")


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    statuses, errors, seconds = ended("killed", tmp_path)
    assert statuses[1] == 7, errors
    assert statuses[0] != 0
    assert "rank 1 has ended: its process is gone" in errors[0]
    assert seconds < 120  # with the imports and the first capture
