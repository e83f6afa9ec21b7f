"""Tests of Triton kernels: on a GPU where there is one, else through Triton's interpreter.

Triton decides when it is imported whether it interprets, so without a GPU a file runs itself in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from accelpatch.kernels.triton import launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = INTERPRETED or DEVICE.type == "cuda"  # Triton kernels run in this process
LOW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cuts bfloat16 off where GPUs round
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
here = pytest.mark.skipif(not HERE, reason="run by test_through_the_interpreter, in its process")


def interpret(file: str, *options: str) -> None:
    """The tests of a file pass in a process in which Triton interprets. options: of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", file, *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes tensors of the CPU. For each test of a file that imports this."""
    if INTERPRETED:
        monkeypatch.setattr(launch, "why_not", lambda device, *dtypes: None)
        monkeypatch.setattr(launch, "no_wgmma", lambda device: None)
