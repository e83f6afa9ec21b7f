"""The program in docs/training.md runs, and leaves an adapter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_example(smollm2: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ, check=True, timeout=600)
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()
