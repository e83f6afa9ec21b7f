"""GPTQ that is killed, runs out of space, or has little text, shared weights or a model that gives no numbers."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.checkpoints import resume
from accelpatch.checkpoints.target import unfinished_folder
from accelpatch.errors import LoadError, PatchError, PlanError, SaveError
from accelpatch.recipe import methods
from tests.checkpoints.test_kills import _forked
from tests.support.checkpoints import digests, opened
from tests.support.packed import plain
from tests.support.tiny import snapshot
from tests.support.word_tokenizer import of_words

GPTQ = methods.by_method(methods.of_bits(4), "gptq", 4, 32)


@pytest.fixture
def text(tmp_path: Path, floats: Path) -> Path:
    """Its file; the folder of floats has the tokenizer."""
    of_words().save_pretrained(floats)
    (file := tmp_path / "text.txt").write_text("".join(f" {place * 37 % 100}" for place in range(140)))
    return file


def refused(floats: Path, text: Path, out: Path) -> None:
    """Quantise; a SaveError where that is refused."""
    try:
        quantised(floats, text, out)
    except PatchError as error:
        raise SaveError(str(error)) from error


def quantised(floats: Path, text: Path, out: Path) -> dict[str, str]:
    """Digests of the folder that is written."""
    accelpatch.api.quantize(str(floats), GPTQ, out, data=text, verify=False, progress=False)
    return digests(out)


def test_killed_after_a_block(floats: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal that no program sees: the next run goes on, and writes the same bytes."""
    due, out, kept = quantised(floats, text, tmp_path / "due"), tmp_path / "out", list[str]()
    stock = resume.Blocks.keep

    def killed(self: resume.Blocks, block: str, made: Any) -> None:
        stock(self, block, made)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(resume.Blocks, "keep", killed)
        assert _forked(lambda: quantised(floats, text, out)) == -signal.SIGKILL
    assert not out.exists()
    assert [file.name for file in unfinished_folder(out).iterdir()] == ["model.layers.0.block.safetensors"]

    def counted(self: resume.Blocks, block: str, made: Any) -> None:
        kept.append(block)
        stock(self, block, made)

    monkeypatch.setattr(resume.Blocks, "keep", counted)
    assert quantised(floats, text, out) == due
    assert kept == ["model.layers.1"]
    assert not unfinished_folder(out).exists()


@pytest.mark.parametrize("size", [0, 10_000], ids=lambda size: f"{size} bytes")
def test_a_full_disk(floats: Path, text: Path, tmp_path: Path, size: int) -> None:
    """No file may be longer than `size`, so that the first block, or a part of it, cannot be kept."""
    due, out = quantised(floats, text, tmp_path / "due"), tmp_path / "out"

    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        refused(floats, text, out)

    assert _forked(act) == 3  # a SaveError
    assert not out.exists()
    assert quantised(floats, text, out) == due


def test_the_error_of_a_full_disk(floats: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume.os, "replace", full)
    with pytest.raises(PatchError, match=r"free some space .*; nothing was changed"):
        quantised(floats, text, tmp_path / "out")


def test_text_that_is_too_short(floats: Path, text: Path, tmp_path: Path) -> None:
    text.write_text(" 1 2 3 4 5")
    with pytest.raises(LoadError, match="the text has 5 tokens, and 32 are the least to calibrate on: give more text"):
        quantised(floats, text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fewer_tokens_than_channels(text: Path) -> None:
    """Their moments have no inverse; damping makes one, and the report says how little text it was."""
    text.write_text("".join(f" {place % 97}" for place in range(40)))
    model = accelpatch.patch(plain("llama"), GPTQ, data=text, tokenizer=of_words(), verify=False, progress=False)
    assert "14 weights: calibrated on fewer tokens than channels" in "\n".join(model.accelpatch.report().notes)
    with torch.no_grad():
        assert bool(model(input_ids=torch.arange(9)[None]).logits.isfinite().all())


def test_tied_and_shared_weights(floats: Path, text: Path, tmp_path: Path) -> None:
    """The head that is tied to the embedding stays tied; a projection that two layers have is refused."""
    quantised(floats, text, tmp_path / "out")
    made = opened(tmp_path / "out")
    head, table = made.lm_head.canonical().tensors(), made.model.embed_tokens.canonical().tensors()
    assert all(one.equal(table[name]) for name, one in head.items())
    model = plain("llama")
    layers = model.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    before = snapshot(model)
    with pytest.raises(
        PlanError, match=r"would split the weight that model\.layers\.0\..*q_proj shares with model\.lay"
    ):
        accelpatch.patch(model, GPTQ, data=text, tokenizer=of_words(), verify=False, progress=False)
    assert snapshot(model) == before
