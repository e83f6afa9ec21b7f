"""accelpatch finetune on the real default model, a few steps of it: the loss of its own puzzles falls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelpatch.training import puzzles

from .conftest import Cli

pytest.importorskip("trl", reason="TRL is not installed: pip install 'accelpatch[train]'")


@pytest.mark.nightly
@pytest.mark.usefixtures("smollm2")
def test_smollm2_learns_puzzles(cli: Cli, tmp_path: Path) -> None:
    """Reverse alone, of which some rows are enough to see it. The whole default run is a test of the docs."""
    train, _ = puzzles.as_rows()
    chosen = [row.values for row in train if row.values["prompt"].startswith("Reverse")][:24]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(dict(one)) + "\n" for one in chosen))
    given = (
        "optimizer.learning_rate=3e-3",
        "batch.size=4",
        "data.held_out=0",
        "schedule.warmup_steps=1",
        "data.template=none",
    )
    words = [word for one in given for word in ("--set", one)]
    result = cli(
        "finetune", "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--recipe", "exact", *words
    )
    assert result.exit_code == 0, result.stderr
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in log if "loss" in one]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "out/plot.png").is_file()
