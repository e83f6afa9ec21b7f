"""Captured calls of encoders whose attention mask hides nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, masking_utils

from accelpatch.runtime.graphs.calls import CALL, RUNS, CapturedCalls
from accelpatch.runtime.graphs.masks import no_mask_of_ones
from tests.fusion.test_fused_layer import _as_on_a_gpu, paths  # noqa: F401
from tests.runtime.graphs.test_calls import SIZES, bert, text
from tests.support.steps import stock


@torch.no_grad()
def test_a_mask_that_hides_nothing_is_left_out() -> None:
    model, batch = bert(), text(2, 9)
    for _ in range(RUNS):
        model(**batch)
    assert CALL not in paths(model)
    for _ in range(2):  # the same graph with such a mask and without one
        for given in (batch, {name: one for name, one in batch.items() if name != "attention_mask"}):
            torch.testing.assert_close(model(**given).logits, stock(model)(**given).logits, rtol=1e-4, atol=1e-5)
    assert paths(model)[CALL] == 4


class Shifted(BertForMaskedLM):
    """A model to which a mask of ones and none are not the same."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """As of BertForMaskedLM."""
        found = super().forward(input_ids, attention_mask, **kwargs)
        found.logits = found.logits + (1 if attention_mask is None else 0)
        return found


class Demanding(BertForMaskedLM):
    """A model that must have a mask."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """As of BertForMaskedLM."""
        if attention_mask is None:
            raise ValueError("give an attention mask")
        return super().forward(input_ids, attention_mask, **kwargs)


@pytest.mark.parametrize("kind", [Shifted, Demanding], ids=["others", "fails"])
@torch.no_grad()
def test_a_call_that_needs_its_mask_of_ones_keeps_it(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kind(BertConfig(vocab_size=120, **SIZES)).eval()
    batch, calls = text(1, 9), CapturedCalls(own, lambda program: program() or Replay(program))
    monkeypatch.setattr(calls, "_known", True)  # as if it were a class of transformers
    monkeypatch.setattr(calls, "_forward", own)
    due = own(**batch).logits
    for _ in range(2 * RUNS + 3):
        found = calls.of(batch, torch.device("cpu"))
    assert isinstance(found, tuple)
    call, given = found
    assert given["attention_mask"] is batch["attention_mask"]
    assert torch.equal(call(given).logits, due)


class Replay:
    """A graph that runs its program anew."""

    def __init__(self, program: Any) -> None:
        self.replay = program


def test_no_mask_is_made_in_a_captured_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a graph is captured
    config = BertConfig(vocab_size=120, **SIZES, attn_implementation="sdpa")
    traced, states, made = masking_utils.is_tracing, torch.zeros(2, 5, 128), masking_utils.create_bidirectional_mask
    with no_mask_of_ones():
        assert made(config=config, inputs_embeds=states, attention_mask=None) is None
        assert made(config=config, inputs_embeds=states, attention_mask=torch.ones(2, 5).long()) is not None
    assert masking_utils.is_tracing is traced


def test_captures_of_two_threads_leave_the_function_of_transformers() -> None:
    before, done = masking_utils.is_tracing, threading.Event()

    def other() -> None:
        with no_mask_of_ones():
            done.wait(60)

    thread = threading.Thread(target=other)
    with no_mask_of_ones():
        thread.start()
        thread.join(0.2)  # without a lock it would be inside by now
    done.set()
    thread.join(60)
    assert masking_utils.is_tracing is before
