"""Timings, the read limit and stock generate() as measured."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelpatch.bench import generate, read_limit, timing

CPU = torch.device("cpu")


def test_a_timing_is_that_of_the_call() -> None:
    taken = timing.measure(lambda: time.sleep(0.02), device=CPU, repeats=3, warmup=0)
    assert len(taken.seconds) == 3
    assert 0.02 <= taken.median < 0.2


def test_no_garbage_is_collected_within_a_call() -> None:
    seen = []

    def call() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        timing.once(call, CPU)
    assert seen == [False]
    assert gc.isenabled()


def test_warmup_is_called_and_not_timed() -> None:
    calls: list[int] = []
    taken = timing.measure(lambda: calls.append(1), device=CPU, repeats=2, warmup=3)
    assert (len(calls), len(taken.seconds)) == (5, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_replays_run_the_work_again() -> None:
    count = torch.zeros(1, device="cuda")
    taken = timing.measure_replays(lambda: count.add_(1), repeats=3)
    assert len(taken.seconds) == 3
    assert count.item() > 1 + 3, "once before the graph, then by each replay"


def test_median_spread_and_rate() -> None:
    taken = timing.timing([2.0, 1.0, 4.0])
    assert (taken.median, taken.spread) == (2.0, 1.5)
    assert taken.rate(8) == {"median": 4.0, "low": 2.0, "high": 8.0}


@pytest.mark.parametrize("seconds", [[], [1.0, 0.0], [-0.1]], ids=["none", "zero", "negative"])
def test_no_timing_of_nothing(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="no timing"):
        timing.timing(seconds)


def test_read_limit_is_of_this_world() -> None:
    limit = read_limit.read_limit(CPU)
    assert 1e9 < limit.bytes_per_second < 2e12
    assert limit.buffer_bytes >= 8 * read_limit.last_level_cache()
    assert limit.threads == torch.get_num_threads()


def test_last_level_cache_is_read(tmp_path: Path) -> None:
    for index, size in enumerate(["48K", "2048K", "32M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert read_limit.last_level_cache(tmp_path) == 32 << 20
    assert read_limit.last_level_cache(tmp_path / "none") == 0


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return GPT2LMHeadModel(config).eval()


def test_generate_does_not_stop_early(model: GPT2LMHeadModel) -> None:
    """The measure asks for an exact number of tokens even of a model that says `end` at once."""
    bias = torch.zeros(50)
    bias[2] = 1e4
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
    ids = generate.prompt_ids(50, generate.Shape(1, 5, 7))
    try:
        assert model.generate(ids, max_new_tokens=7, do_sample=False).shape == (1, 6)
        assert generate.generate(model, ids, 7).shape == (1, 12)
    finally:
        handle.remove()


def test_figures_count_tokens(model: GPT2LMHeadModel) -> None:
    figures = generate.measure_generate(model, generate.Shape(2, 5, 9), repeats=2)
    assert figures.decode_rate["median"] == pytest.approx(2 * 8 / figures.decode.median)
    assert figures.prefill_rate["median"] == pytest.approx(2 * 5 / figures.prefill.median)
    assert figures.steps_per_second == pytest.approx(8 / figures.decode.median)


def test_cached_bytes_are_those_of_one_token(model: GPT2LMHeadModel) -> None:
    assert generate.cached_bytes(model) == 2 * 32 * 4  # keys and values of one layer in float32
    assert generate.cached_bytes(model.to(torch.bfloat16)) == 2 * 32 * 2
    model.float()
