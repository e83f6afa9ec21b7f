"""accelpatch bench."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accelpatch.bench import read_limit, record, timing

from .conftest import Cli

# Threads of a step spin for a millisecond after it: 128 further tokens take far longer than that.
QUICK = ("--prompt-tokens", "16", "--new-tokens", "129", "--repeats", "2")


@pytest.fixture(autouse=True)
def _small_and_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read limit on a buffer that is quickly made; and times that other processes on the machine cannot stretch."""
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    monkeypatch.setattr(read_limit, "last_level_cache", lambda: 0)
    monkeypatch.setattr(timing, "perf_counter", time.process_time)


def test_json_has_what_a_figure_needs(cli: Cli, model: str) -> None:
    found = json.loads(cli("bench", model, "--json", *QUICK).stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert found["shape"] == {"batch": 1, "prompt": 16, "new": 129}
    assert found["device"]["threads"] == torch.get_num_threads()
    assert found["verification"]["failures"] == []
    assert found["read_limit"]["bytes_per_second"] > 1e8
    for side in ("original", "patched"):
        decode = found[side]["decode"]
        assert len(decode["seconds"]) == 2
        assert decode["tokens_per_second"]["median"] > 0
        share = decode["tokens_per_second"]["median"] / decode["limit_tokens_per_second"]
        assert decode["share_of_read_limit"] == pytest.approx(share)
        read = found[side]["token_bytes"] + found["cache_bytes"]
        assert decode["limit_tokens_per_second"] == pytest.approx(found["read_limit"]["bytes_per_second"] / read)
    assert found["cache_bytes"] > 0
    assert found["patched"]["token_bytes"] < 0.3 * found["original"]["token_bytes"]


def test_a_package_that_runs_from_a_folder_has_no_version(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(record, "version", version)
    found = json.loads(cli("bench", model, "--json", *QUICK).stdout)
    assert found["versions"]["accelpatch"] == "not installed, run from a folder"


def test_text_states_parity_before_speed(cli: Cli, model: str) -> None:
    text = cli("bench", model, *QUICK).stdout
    assert text.index("every site within its bound") < text.index("decode tokens/s")
    for word in ("command   accelpatch", "date", "device", "versions", "median of 2", "GB/s read"):
        assert word in text


def test_drafts_of_another_model(cli: Cli, model: str) -> None:
    text = cli("bench", model, "--recipe", "int8", "--draft", model, *QUICK).stdout
    assert "patched, with drafts" in text
    assert re.search(r"with drafts against patched: decode [\d.]+ x", text)
    assert cli("bench", model, "--draft", model, "--batch", "2").exit_code == 2


def test_batch_counts_all_sequences(cli: Cli, model: str) -> None:
    found = json.loads(cli("bench", model, "--json", "--batch", "3", *QUICK).stdout)
    decode = found["patched"]["decode"]
    assert decode["tokens_per_second"]["median"] == pytest.approx(3 * 128 / decode["median"])


def test_random_weights_need_no_checkpoint(cli: Cli, bare_model: str) -> None:
    found = json.loads(cli("bench", bare_model, "--random-weights", "--json", *QUICK).stdout)
    assert found["weights"] == "random"
    assert found["patched"]["decode"]["tokens_per_second"]["median"] > 0


def test_seconds_bound_the_repetitions(cli: Cli, model: str) -> None:
    """The warm-up takes the second, and one repetition is timed all the same."""
    shape = ("--prompt-tokens", "16", "--new-tokens", "200", "--batch", "8", "--repeats", "1000")
    result = cli("bench", model, "--json", "--seconds", "1", *shape)
    found = json.loads(result.stdout)
    assert (found["repeats"], found["seconds"]) == (1000, 1.0)
    for side, name in (("original", "the original"), ("patched", "the patched model")):
        assert 1 <= found[side]["repeats"] == len(found[side]["decode"]["seconds"]) < 1000
        assert re.search(rf"^measuring {name}: [1-9]\d* repetitions, about \d+ s$", result.stderr, re.MULTILINE)
    assert "of 1000 repetitions: the rest did not fit 1 s a model" in record.text(found)


def _record(rates: tuple[float, float], limits: tuple[float, float]) -> dict[str, Any]:
    def side(rate: float, limit: float) -> dict[str, Any]:
        spread = {"median": rate, "low": 0.9 * rate, "high": 1.1 * rate}
        decode = {
            "tokens_per_second": spread, "limit_tokens_per_second": limit, "share_of_read_limit": rate / limit
        }  # fmt: skip
        return {"decode": decode, "prefill": {"tokens_per_second": spread}}

    return {"original": side(rates[0], limits[0]), "patched": side(rates[1], limits[1])}


@pytest.mark.parametrize(
    ("rates", "limits", "off"),
    [
        pytest.param((312.0, 2095.0), (98e3, 560e3), 2, id="tiny"),
        pytest.param((8.3, 164.3), (62.0, 233.0), 0, id="135M"),
        pytest.param((0.52, 4.1), (1.6, 5.1), 0, id="7B"),
    ],
)
def test_the_plot_keeps_its_bars_high(rates: Any, limits: Any, off: int) -> None:
    """A limit off the scale is an arrow with its number; no label crosses another."""
    figures = pytest.importorskip("matplotlib.figure", reason="the plot extra is not installed")
    from accelpatch.bench import plot

    figure = figures.Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)[0]
    plot.draw_stage(axes, _record(rates, limits), "decode")
    figure.canvas.draw()
    assert max(bar.get_height() for bar in axes.patches) > 0.5 * axes.get_ylim()[1]
    words = [text for text in axes.texts if text.get_text()]
    assert sum(text.get_text().startswith("read limit") for text in words) == off
    assert sum(text.get_text().startswith("limit") for text in words) == 2 - off
    extents = [text.get_window_extent() for text in words]
    assert not any(one.overlaps(other) for at, one in enumerate(extents) for other in extents[:at])


def test_plot(cli: Cli, model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    file = tmp_path / "figure.png"
    assert cli("bench", model, "--plot", str(file), *QUICK).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("figure.txt", ".png", id="no picture"),
        pytest.param("missing/figure.png", "there is no folder", id="folder is missing"),
    ],
)
def test_plots_that_cannot_be_drawn(cli: Cli, model: str, tmp_path: Path, path: str, words: str) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    result = cli("bench", model, "--plot", str(tmp_path / path))
    assert result.exit_code == 1
    assert words in result.stderr


def test_plot_without_matplotlib(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.bench.plot.find_spec", lambda name: None)
    result = cli("bench", model, "--plot", "figure.png")
    assert result.exit_code == 1
    assert "pip install 'accelpatch[plot]'" in result.stderr


def test_more_tokens_than_the_context(cli: Cli, model: str) -> None:
    result = cli("bench", model, "--prompt-tokens", "250", "--new-tokens", "10")
    assert result.exit_code == 1
    assert "context of 256" in result.stderr
