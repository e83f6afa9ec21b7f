"""accelpatch bench."""

from __future__ import annotations

import json
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

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


def test_batch_counts_all_sequences(cli: Cli, model: str) -> None:
    found = json.loads(cli("bench", model, "--json", "--batch", "3", *QUICK).stdout)
    decode = found["patched"]["decode"]
    assert decode["tokens_per_second"]["median"] == pytest.approx(3 * 128 / decode["median"])


def test_random_weights_need_no_checkpoint(cli: Cli, bare_model: str) -> None:
    found = json.loads(cli("bench", bare_model, "--random-weights", "--json", *QUICK).stdout)
    assert found["weights"] == "random"
    assert found["patched"]["decode"]["tokens_per_second"]["median"] > 0


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
