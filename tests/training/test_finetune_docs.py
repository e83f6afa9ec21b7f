"""docs/finetune.md stays true: its keys, its names, and on the real model its commands and figures."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accelpatch.training import configuration
from tests.cli.conftest import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/finetune.md").read_text()


def test_the_keys_are_those_of_the_code() -> None:
    listed = re.findall(r"^\| `([a-z_.]+)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    keys = {name: (default, text) for name, default, text in listed}
    assert set(keys) == set(configuration.KEYS)
    for name, key in configuration.KEYS.items():
        default = configuration.resolve(keys[name][0])
        assert (default, keys[name][1]) == (key.default, key.help), name


def test_the_configurations_are_those_that_are_bundled() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert set(listed) == set(configuration.bundled())


@pytest.mark.nightly
def test_the_page(smollm2: Path, tmp_path: Path) -> None:
    """Its commands and its program, one after the other: the default run goes from under 20% to over 80%."""
    pytest.importorskip("trl")
    rows = [{"prompt": f"{one}+{one}=", "completion": str(2 * one)} for one in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = [sys.executable, "-m", *shlex.split(line)]
            done = subprocess.run(
                words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
                input="Sort: c a t\n",
            )  # fmt: skip
            assert done.returncode == 0, f"{line}: {done.stderr}"
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True)
    result = json.loads((tmp_path / "puzzles/result.json").read_text())
    assert result["exact_before"] < 0.2
    assert result["exact_after"] > 0.8
