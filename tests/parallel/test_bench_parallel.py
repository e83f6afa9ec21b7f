"""The programs that time models on several devices run on a CPU: maps that need no GPU, and ranks by gloo."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.parallel import layout
from tests.support.tiny import CAUSAL

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    words = ["parallel", "--tiny", "--repeats", "1", "--new", "4", "--offloaded-new", "3", "--recipes", "int4"]
    words += ["--cases", "one", "auto", "cpu", "disk", "--folder", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    engines = [(row["map"], row["engine"]) for row in rows]
    assert engines == [(kind, engine) for kind in ("one", "cpu", "disk") for engine in ("unpatched", "int4")]
    assert all(row["apart"] < 1e-3 and row["tok/s"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "auto: it needs two GPUs" in printed
    assert "| disk | int4 |" in printed


def test_a_tiny_run_of_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are printed by rank 0 as they come; one GPU's are of the same job."""
    out, traces = tmp_path / "found.json", tmp_path / "traces"
    words = ["tensor_parallel", "--tiny", "--repeats", "1", "--new", "4", "--batches", "1", "2", "--json", str(out)]
    words += ["--cases", "peer", "all_reduce", "tiny-exact", "--timeline", str(traces)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capfd.readouterr().out
    assert ended.value.code == 0, printed
    found = json.loads(out.read_text())
    assert [(row["batch"], row["ranks"], row["way"]) for row in found["rows"]] == [
        (1, 1, ""), (2, 1, ""), (1, 2, "nccl"), (2, 2, "nccl"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["tok/s"] > 0
        assert row["logits apart"] < 1e-5
        assert row["tokens"] == ("" if row["ranks"] == 1 else "the same on all ranks")
    for row in found["all_reduce"]:
        assert row["nccl, us"] > 0
        assert row["nccl and residual, us"] > 0
        assert row["one_shot, us"] is row["push, us"] is row["push and residual, us"] is None
    assert "| peer memory | there is none between CPUs |" in printed
    for way in ("one_shot", "push"):
        assert f"tiny-exact, {way}: ACCELPATCH_ALL_REDUCE={way} needs GPUs" in printed
    assert re.search(r"^\| c10d::allreduce_ \| 5 \| ", printed, re.MULTILINE)  # two a layer, and the embedding's
    assert sorted(path.name for path in traces.iterdir()) == ["tiny-exact-nccl.json.gz", "tiny-exact-one.json.gz"]


@pytest.mark.parametrize("kind", ["auto", "balanced", "balanced_low_0", "sequential", "hand"])
def test_maps_over_two_gpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part has a place, no layer is split, and both GPUs have layers."""
    room = {0: 10**9, 1: 10**9, "cpu": 10**9}
    monkeypatch.setattr("accelerate.utils.modeling.get_max_memory", lambda given=None: dict(given or room))
    monkeypatch.setattr("accelerate.utils.modeling.is_mps_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = CAUSAL["qwen2"].make(num_hidden_layers=8)
    places = layout(kind, model, 0.25)
    named = [name for name, _ in model.named_parameters()]
    assert all(sum(name.startswith(f"{part}.") for part in places) == 1 for name in named)
    layers = [places.get(f"model.layers.{place}") for place in range(8)]
    assert set(layers) == {0, 1}
