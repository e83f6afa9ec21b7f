"""Scores and logits that a call of generate() asks for: kept on the device, while it chooses the tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import CAUSAL, padded_batch

ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "several-ends": {"do_sample": False, "eos_token_id": list(range(40)), "pad_token_id": 0},
    "suppressed": {"do_sample": False, "suppress_tokens": list(range(30, 90)), "begin_suppress_tokens": [1, 2]},
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_stock_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    plain, length = copy.deepcopy(model), padded_batch()["input_ids"].shape[1]
    vars(plain)[RUNTIME] = None
    for more in (ASKED, ASKED | {"output_scores": False}, ASKED | {"output_logits": False}, ASKED):
        made = []
        for one in (model, plain):
            torch.manual_seed(5)
            made.append(one.generate(**padded_batch(), max_new_tokens=24, **WAYS[way], **more))
        mine, its = made
        assert torch.equal(mine.sequences, its.sequences)
        assert mine.keys() == its.keys()
        for name in mine.keys() & {"scores", "logits"}:
            assert len(mine[name]) == len(its[name]) == mine.sequences.shape[1] - length
            torch.testing.assert_close(torch.stack(mine[name]), torch.stack(its[name]), rtol=1e-4, atol=1e-5)
    counts = model.accelpatch.report().paths
    assert counts[CAPTURED] > 4
    assert not any(path.startswith(("stock loop", "token chosen by the host")) for path in counts), counts
