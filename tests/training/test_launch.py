"""accelerate launch of the finetune command: two processes on the CPU, each with its own patched model, one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import byte_tokenizer, environment, save_model

pytest.importorskip("trl", reason="TRL is not installed: pip install 'accelpatch[train]'")


@pytest.mark.nightly
def test_two_processes(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny", tokenizer=byte_tokenizer())
    rows = [{"prompt": f"{one}+{one}=", "completion": str(2 * one)} for one in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("schedule.max_steps=3", "batch.size=2", "evaluation.answers=2", "checkpoint.every=1")
    words = [word for one in given for word in ("--set", one)]
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "accelpatch"]
    command = ["finetune", str(model), "--config", "lora-distributed", "--data", "rows.jsonl", "--out", "out", "--json"]
    done = subprocess.run(
        [sys.executable, *launch, *command, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # of one process alone
    assert document["steps"] == 3
    assert done.stderr.count("step 1 of 3: loss") == 1
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
