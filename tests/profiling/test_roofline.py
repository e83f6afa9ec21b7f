"""Bytes and operations of a step, and their shares of the limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import accelpatch
from accelpatch.bench import read_limit
from accelpatch.bench.generate import Shape
from accelpatch.bench.read_limit import ReadLimit
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.linear import float_linear, int8_embedding
from accelpatch.profiling import roofline as rooflines
from accelpatch.profiling import run
from accelpatch.profiling.work import work
from tests.cli.conftest import Cli, byte_tokenizer, cli, save_model  # noqa: F401
from tests.support.one_thread import _one_thread  # noqa: F401


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("profiling") / "tiny", tokenizer=byte_tokenizer()))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    monkeypatch.setattr(read_limit, "last_level_cache", lambda: 0)
    monkeypatch.setattr(rooflines, "PEAK_ON_CPU", 64)


def test_the_work_of_a_linear_layer() -> None:
    x, w, bias = torch.ones(3, 8), torch.ones(16, 8), torch.ones(16)
    found = work("float_linear", float_linear.spec, (x, w, bias), 0)
    assert (found.bytes, found.operations) == (4 * (24 + 128 + 16), 2 * 3 * 16 * 8)
    assert work("float_linear", float_linear.spec, (x, w, None), 0).bytes == 4 * (24 + 128)


def test_an_embedding_reads_the_rows_that_it_looks_up() -> None:
    args = (torch.tensor([1, 2]), torch.zeros(100, 8, dtype=torch.int8), torch.ones(100, 1), torch.float32)
    made = int8_embedding.spec(*args)
    found = work("int8_embedding", int8_embedding.spec, args, 0)
    assert made.sizes["N"] == 100
    assert found.bytes == (16 + 800 + 400) * 2 // 100


def test_the_work_of_a_native_step_is_that_of_its_layers(model: str) -> None:
    network = accelpatch.load(model, "int8", device="cpu").model
    profile = run.record(network, Shape(1, 8, 16), repeats=1)
    limit = ReadLimit(1e9, 1, 1, "given")
    found = rooflines.roofline(profile, limit, 1e9, torch.float32)
    points = {one.operation: one for one in found.points}
    layer, last = points["decode_step of a layer"], points["decode_step of a layer and the head"]
    report = network.accelpatch.report()
    weights = sum(site.token_bytes[1] for site in report.sites if ".layers.0." in site.path)
    cache = 2 * 4 * 2 * 16 * (8 + 16 // 2)  # keys and values, float32, 2 heads of 16, tokens in the middle
    assert layer.bytes == pytest.approx(weights + cache, rel=0.1)
    assert (layer.count, last.count) == (1, 1)
    flop = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 4 * 64 * 16
    assert layer.operations == flop
    assert last.operations == flop + 2 * 260 * 64
    assert layer.read_share == pytest.approx(layer.bytes / layer.microseconds * 1e6 / 1e9)
    assert layer.peak_share == pytest.approx(layer.operations / layer.microseconds * 1e6 / 1e9)
    assert sum(one.microseconds for one in found.points) == pytest.approx(profile.summary.busy)
    assert layer.bound == "peak"  # more operations than bytes, and equal limits


def test_the_command(cli: Cli, model: str, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    plot, quick = tmp_path / "roofline.png", ("--prompt-tokens", "8", "--new-tokens", "8", "--device", "cpu")
    found = json.loads(cli("profile", "roofline", model, "--json", "--plot", str(plot), *quick).stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert 0 < found["covered"] <= 1
    assert found["read_limit"] > 1e8
    assert any(one["operation"] == "decode_step of a layer" and one["read_share"] > 0 for one in found["operations"])
    text = cli("profile", "roofline", model, "--recipe", "exact", *quick).stdout
    assert "of the limit" in text
    assert "GB/s, measured" in text


def test_wrong_arguments(cli: Cli, model: str, tmp_path: Path) -> None:  # noqa: F811
    assert "--plot draws" in cli("profile", "roofline", model, "--plot", str(tmp_path / "x.txt")).stderr
    assert "more than the context of 256" in cli("profile", "trace", model, "--prompt-tokens", "300").stderr
    (tmp_path / "file").write_text("")
    said = cli("profile", "trace", model, "--out", str(tmp_path / "file")).stderr
    assert "is a file" in " ".join(said.replace("│", " ").split())  # wrapped where the path is long


def test_attention_over_a_prompt() -> None:
    q, k = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 7, 8)
    found = work("flash_attention", flash_attention.spec, (q, k, k.clone()), 0)
    assert (found.bytes, found.operations) == (4 * 8 * (24 + 28), 4 * 4 * 6 * 7 * 8)
