"""The hub: a copy downloaded before is used, and where it cannot be reached that is said soon."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from accelpatch.errors import LoadError
from accelpatch.models import hub, load

IDS = torch.arange(1, 13)[None]


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)


def test_unreachable_hub(empty_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(LoadError) as caught:
        load.load("llama2-7b")
    assert time.monotonic() - began < 10
    for part in ("meta-llama/Llama-2-7b-hf", "local cache", "cannot be reached", "path of a folder"):
        assert part in str(caught.value)


@pytest.fixture
def black_hole() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_hub_that_never_answers(empty_hub: None, black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", black_hole)
    monkeypatch.setattr(hub, "REACH_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(LoadError, match="cannot be reached"):
        load.load("someone/model")
    assert time.monotonic() - began < 10


def test_offline_mode_asks_nobody(empty_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_reach", lambda name: pytest.fail("the network was asked"))
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE"):
        load.load("someone/model")


def cached_copy(folder: Path, hub_cache: Path) -> Path:
    commit = "0" * 40
    repository = hub_cache / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    return folder.rename(repository / "snapshots" / commit)


def test_copy_downloaded_before_needs_no_network(
    folder: Path, tmp_path: Path, tiny_llama: LlamaForCausalLM, empty_hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached_copy(folder, tmp_path / "hub")
    monkeypatch.setattr(hub, "_reach", lambda name: pytest.fail("the network was asked"))
    loaded = load.load("someone/model")
    assert loaded.source.kind == "hub"
    assert torch.equal(loaded.model(IDS).logits, tiny_llama(IDS).logits)
    assert load.from_config("someone/model").config.vocab_size == 128
    (snapshot / "model.safetensors").unlink()
    monkeypatch.setattr(hub, "_reach", hub._reach)
    with pytest.raises(pytest.fail.Exception, match="the network was asked"):
        load.load("someone/model")


def test_from_config_never_asks_the_network(empty_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reach", lambda name: pytest.fail("the network was asked"))
    with pytest.raises(LoadError, match="its configuration is not here"):
        load.from_config("someone/model")
