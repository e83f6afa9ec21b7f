"""Inputs at the edges of what a model takes: a patched model answers, or refuses, as the original does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from tests.support.tiny import CAUSAL, full_batch, padded_batch

ERRORS = (RuntimeError, ValueError, IndexError)


def outcome(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The logits' shape, or the kind of error."""
    try:
        with torch.no_grad():
            return tuple(model(**batch).logits.shape)
    except ERRORS as error:
        return type(error)


def made(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Any:
    """The shape of what generate() gives, or the kind of error."""
    try:
        return tuple(model.generate(**batch, do_sample=False, **options).shape)
    except ERRORS as error:
        return type(error)


def rows(batch: dict[str, Tensor], count: int, length: int) -> dict[str, Tensor]:
    return {key: value[:count, :length] for key, value in batch.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("count, length", [(0, 9), (3, 0), (1, 1)], ids=["batch-0", "length-0", "one-token"])
def test_empty_and_tiny_batches(name: str, recipe: str, count: int, length: int) -> None:
    batch = rows(full_batch(), count, length)
    due = outcome(CAUSAL[name].make(), batch), made(CAUSAL[name].make(), batch, max_new_tokens=3)
    model = accelpatch.patch(CAUSAL[name].make(), recipe)
    assert (outcome(model, batch), made(model, batch, max_new_tokens=3)) == due


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_prompt_longer_than_the_context(name: str) -> None:
    batch = full_batch(140)  # 128 positions
    due = outcome(CAUSAL[name].make(), batch)
    assert outcome(accelpatch.patch(CAUSAL[name].make(), "int8"), batch) == due


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(side: str) -> None:
    batch = padded_batch()
    if side == "right":
        batch = {key: value.flip(1) for key, value in batch.items()}
    original, model = CAUSAL["llama"].make(), accelpatch.patch(CAUSAL["llama"].make(), "exact")
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits[keep], original(**batch).logits[keep], rtol=1e-4, atol=1e-5)
    assert made(model, batch, max_new_tokens=4) == made(original, batch, max_new_tokens=4)
