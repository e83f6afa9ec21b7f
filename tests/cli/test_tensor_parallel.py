"""--tp of run and plan: the ranks are started, one of them prints, and none is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Cli, Shell

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parallel.md").read_text()


def test_run_with_two_ranks(shell: Shell, model: str) -> None:
    words = ("run", model, "--recipe", "exact", "--max-new-tokens", "8", "--verify", "off", "--json")
    alone, both = shell(*words), shell(*words, "--tp", "2")
    assert both.returncode == 0, both.stderr
    found, due = json.loads(both.stdout), json.loads(alone.stdout)
    assert found["answer"] == due["answer"]
    assert any(note.startswith("tensor parallel: rank 0 of 2 (gloo) has ") for note in found["report"]["notes"])


def test_options_that_do_not_go_with_it(cli: Cli, model: str) -> None:
    refused = cli("run", model, "--tp", "2", "--compare")
    assert refused.exit_code == 2
    assert "goes without --compare" in refused.output


def test_a_plan_for_the_first_of_four(cli: Cli) -> None:
    found = cli("plan", "llama2-7b", "--recipe", "int4", "--arch", "sm_90", "--tp", "4").stdout
    assert "tensor parallel: rank 0 of 4 has " in found
    assert "query heads 0 to 7, key heads 0 to 7, inner columns 0 to 2815" in found  # 22 groups of 128
    assert "4096 x 2816" in found


def test_a_plan_of_a_model_that_one_gpu_has_no_room_for(cli: Cli) -> None:
    found = cli("plan", "llama2-70b", "--recipe", "exact", "--arch", "sm_90", "--tp", "2").stdout
    assert "tensor parallel: rank 0 of 2 has 69.0 GB of 138.0 GB" in found
    assert "query heads 0 to 31, key heads 0 to 3, inner columns 0 to 14335" in found


def test_a_plan_that_cannot_be(cli: Cli) -> None:
    refused = cli("plan", "smollm2-135m", "--tp", "4")
    assert refused.exit_code == 1
    assert "9 query heads with 3 key and value heads cannot be split among 4 ranks" in refused.output


@pytest.mark.nightly
def test_the_page(tmp_path: Path, smollm2: Path) -> None:
    """The commands of docs/parallel.md, with the default model in the place of the hub's."""
    program = next(
        block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "tp" in block
    )
    (tmp_path / "tensor.py").write_text(program.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2)))
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert [line.split()[0] for line in lines] == ["accelpatch", "torchrun"]
    modules = {"accelpatch": "accelpatch", "torchrun": "torch.distributed.run"}
    printed = []
    for line in lines:
        name, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", modules[name], *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "The capital of France is Paris." in printed[0]
    first, second = printed[1].splitlines()
    assert first == second
