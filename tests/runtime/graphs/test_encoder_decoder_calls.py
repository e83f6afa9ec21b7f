"""Single calls of encoder-decoders, of beam search and of a program's own, and the first tokens of their decoder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.encoder_decoder_prompt import CAPTURED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import StrictGraph, encoder_decoder, given_to

pytestmark = pytest.mark.filterwarnings("ignore:recipe exact replaces none")
BEGUN = torch.tensor([[3, 9, 12], [3, 11, 7]])


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)  # type: ignore[arg-type]


def patched(name: str) -> Any:
    return accelpatch.patch(encoder_decoder(name, eos_token_id=None), "exact", verify=False)


def stock(model: Any) -> Any:
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def two_rows(name: str, place: int = 0) -> dict[str, Tensor]:
    """Inputs of the same shapes, others for each place."""
    given = {key: one[:2].clone() for key, one in given_to(name).items()}
    for key, one in given.items():
        if one.is_floating_point():
            given[key] = one.roll(place, -1)
        elif key == "input_ids":
            given[key] = (one + place) % 150 * given["attention_mask"]
    return given


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_beams_begin_by_a_graph_from_the_second_time_on(name: str) -> None:
    model = patched(name)
    plain = stock(model)
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "decoder_input_ids": BEGUN}
    for place in range(3):
        made, due = (one.generate(**two_rows(name, place), **options) for one in (model, plain))
        assert torch.equal(made, due)
    counts = model.accelpatch.report().paths
    assert (counts[CAPTURED_PROMPT], counts[CAPTURED]) == (2, 15)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_loop_of_a_programs_own(name: str) -> None:
    """Logits after every token, caches that go on, and another call's cache in between."""
    model, results = patched(name), []
    for one in (model, stock(model)):
        for place in range(3):
            given, found = two_rows(name, place), []
            states, mask = one.get_encoder()(**given), given.get("attention_mask")
            shown = {} if mask is None else {"attention_mask": mask}
            caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
            with torch.no_grad():
                for cache in (*caches, caches[0]):
                    ids = BEGUN if cache.get_seq_length() == 0 else BEGUN[:, :1] + place
                    call = {"decoder_input_ids": ids, "encoder_outputs": states, CACHE: cache, **shown}
                    found.append(one(**call, use_cache=True).logits)
            assert [cache.get_seq_length() for cache in caches] == [4, 3]
            layers = [layer for both in caches for part in (both.self_attention_cache, both.cross_attention_cache)
                      for layer in part.layers]  # fmt: skip
            results.append([*found, *(layer.keys for layer in layers), *(layer.values for layer in layers)])
    for mine, due in zip(results[:3], results[3:], strict=True):
        for made, its in zip(mine, due, strict=True):
            torch.testing.assert_close(made, its, rtol=1e-4, atol=1e-4)
    counts = model.accelpatch.report().paths
    assert (counts[CAPTURED_PROMPT], counts[CAPTURED]) == (5, 3)


def test_what_no_graph_begins() -> None:
    """A mask or positions of the decoder's own, and rows whose mask hides all that the encoder gave."""
    model = patched("bart")
    plain = stock(model)
    given = two_rows("bart")
    with torch.no_grad():
        states = model.get_encoder()(**given)
    hidden = torch.zeros_like(given["attention_mask"])
    for more in ({"decoder_attention_mask": torch.ones_like(BEGUN)}, {"attention_mask": hidden}):
        for _ in range(2):
            made = []
            for one in (model, plain):
                cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
                call = {"decoder_input_ids": BEGUN, "encoder_outputs": states, CACHE: cache} | given | more
                call.pop("input_ids")
                with torch.no_grad():
                    made.append(one(**call, use_cache=True).logits)
            torch.testing.assert_close(*made)
    assert model.accelpatch.report().paths[CAPTURED_PROMPT] == 0
