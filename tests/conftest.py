"""Models that several test files share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelpatch.kernels import dispatch
from accelpatch.models import catalog, load
from accelpatch.progress import quiet
from tests.support import each_value

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background jobs; the programs that tests start and interrupt would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left with one of them at the end."""
    each_value.mark(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What importing and collecting left behind stays: each later collection looks at the objects of tests alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def chosen_anew(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that replaces an implementation leaves none that dispatch remembers, and meets none of earlier tests."""
    replaces = "monkeypatch" in request.fixturenames
    if replaces:
        dispatch.forget()
    yield  # undone by then is what monkeypatch has set, since this begins before it
    if replaces:
        dispatch.forget()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the embedded default model; downloaded and converted once per machine, in the user's cache."""
    return load.folder_of(catalog.resolve("smollm2-135m"), quiet)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """Two random layers with grouped-query attention, float32, eval; the same weights in every test."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()
