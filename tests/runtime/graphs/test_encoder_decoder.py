"""Captured steps of encoder-decoders behind stock generate(): the stock loop's tokens, and proof that they ran.

No GPU is needed: the CPU is put into the table of graphs with a form that refuses what a real graph would.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture, kv_cache
from accelpatch.runtime.graphs.calls import CALL
from accelpatch.runtime.graphs.encoder_decoder import CrossContents, EncoderDecoderStep
from accelpatch.runtime.graphs.encoder_decoder_prompt import CAPTURED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import FAMILIES, StrictGraph, encoder_decoder, given_to, texts
from tests.support.streaming import Calling

pytestmark = pytest.mark.filterwarnings("ignore:recipe exact replaces none")
NEW, ALL = 12, 32  # tokens
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 4},
}


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)  # type: ignore[arg-type]
    StrictGraph.replays = 0


def patched(name: str, **changes: Any) -> Any:
    return accelpatch.patch(encoder_decoder(name, **changes), "exact", verify=False)


def stock(model: Any) -> Any:
    """A copy of the patched model that runs transformers' own loop."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def both(model: Any, given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    made = []
    for runner in (model, stock(model)):
        torch.manual_seed(5)
        made.append(runner.generate(**copy.deepcopy(given), **options))
    return made[0], made[1]


def assert_equal(model: Any, given: dict[str, Any], **options: Any) -> Tensor:
    mine, its = both(model, given, **options)
    assert torch.equal(mine, its)
    made: Tensor = mine
    return made


def reasons(model: Any) -> list[str]:
    every = model.accelpatch.report().paths
    return [path.removeprefix("stock loop: ") for path in every if path.startswith("stock loop: ")]


def steps(model: Any) -> int:
    return int(model.accelpatch.report().paths[CAPTURED])


def held(model: Any) -> list[EncoderDecoderStep]:
    return list(vars(model)[RUNTIME].captured._steps.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_every_family(name: str) -> None:
    model = patched(name, eos_token_id=None)
    for way in WAYS.values():
        made = assert_equal(model, given_to(name), **way, max_new_tokens=ALL)
        assert made.shape[1] >= ALL
    assert reasons(model) == []
    assert steps(model) == 3 * (ALL - 1)
    assert StrictGraph.replays >= steps(model)


@pytest.mark.parametrize("name", ["t5", "bart", "m2m100"])
def test_texts_that_end_at_different_places(name: str) -> None:
    model = patched(name)
    ends = list(range(2, 60))
    for way in WAYS.values():
        assert_equal(model, texts(), **way, eos_token_id=ends, pad_token_id=0)
    assert reasons(model) == []


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_longer_text_gets_a_new_graph_and_a_shorter_one_may_share(name: str) -> None:
    model = patched(name)
    for length, lengths in ((40, {64}), (11, {64}), (64, {64}), (65, {64, 128}), (9, {64, 128})):
        assert_equal(model, texts(length, padded=length % 2 == 0))
        assert {step.encoded.source.length for step in held(model)} == lengths
    assert reasons(model) == []


def test_a_speech_model_has_no_mask_and_the_length_of_its_encoder() -> None:
    model = patched("whisper")
    assert_equal(model, given_to("whisper"))
    assert [(step.encoded.source.length, step.encoded.mask) for step in held(model)] == [(20, None)]


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_outputs_of_an_encoder_that_the_caller_hands_in(name: str) -> None:
    model, given = patched(name), given_to(name)
    with torch.no_grad():
        states = model.get_encoder()(**given)
    mask = {} if name == "whisper" else {"attention_mask": given["attention_mask"]}
    assert_equal(model, {"encoder_outputs": states, **mask})
    assert steps(model) == NEW - 1
    other = {"encoder_outputs": type(states)(last_hidden_state=-states[0]), **mask}
    assert not torch.equal(assert_equal(model, other), assert_equal(model, {"encoder_outputs": states, **mask}))


@pytest.mark.parametrize("name", ["t5", "bart", "m2m100", "whisper"])
def test_a_decoder_that_begins_with_given_tokens(name: str) -> None:
    model, rows = patched(name), 2 if name == "whisper" else 3
    begun = torch.tensor([[3, 9, 12], [3, 11, 7], [3, 8, 8]])[:rows]
    assert_equal(model, {**given_to(name), "decoder_input_ids": begun})
    mask = torch.ones_like(begun)
    mask[1, 0] = 0
    assert_equal(model, {**given_to(name), "decoder_input_ids": begun, "decoder_attention_mask": mask})
    assert_equal(model, {**given_to(name), "decoder_input_ids": begun, "decoder_attention_mask": mask}, num_beams=3)
    assert reasons(model) == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"forced_bos_token_id": 9, "forced_eos_token_id": 2}, id="forced"),
        pytest.param({"suppress_tokens": list(range(60)), "begin_suppress_tokens": [70, 71]}, id="suppressed"),
        pytest.param({"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, id="repetition"),
        pytest.param({"min_new_tokens": 9, "eos_token_id": list(range(2, 90))}, id="at least"),
    ],
)
def test_forced_and_suppressed_ids(options: dict[str, Any]) -> None:
    for name in ("t5", "bart"):
        model = patched(name)
        assert_equal(model, texts(), **options)
        assert_equal(model, texts(), **options, num_beams=4)
        assert reasons(model) == []
        assert steps(model) > 10


def test_whats_returned_is_what_the_stock_loop_returns() -> None:
    model = patched("bart")
    for more in ({}, {"output_scores": True, "output_logits": True}):
        mine, its = both(model, texts(), return_dict_in_generate=True, **more)
        assert type(mine) is type(its)
        assert mine.keys() == its.keys()
        for name in ("scores", "logits") if more else ():
            for one, due in zip(mine[name], its[name], strict=True):
                torch.testing.assert_close(one, due, rtol=1e-4, atol=1e-4)
        for part in ("self_attention_cache", "cross_attention_cache"):
            own, due = getattr(mine[CACHE], part), getattr(its[CACHE], part)
            for layer, other in zip(own.layers, due.layers, strict=True):
                torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(layer.values, other.values, rtol=1e-4, atol=1e-5)
    assert steps(model) == 2 * (NEW - 1)


def test_a_cache_of_the_callers_goes_on() -> None:
    results = []
    model = patched("bart")
    for runner in (model, stock(model)):
        first = runner.generate(**texts(), max_new_tokens=8, return_dict_in_generate=True, do_sample=False)
        more = {"decoder_input_ids": first.sequences, "encoder_outputs": runner.get_encoder()(**texts())}
        given = {**more, "attention_mask": texts()["attention_mask"], CACHE: first[CACHE]}
        results.append(runner.generate(**given, max_new_tokens=8, do_sample=False))
    assert torch.equal(*results)
    assert steps(model) == 14


def test_a_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "SMALLEST", 8)
    for name in ("t5", "bart"):
        model = patched(name)
        for way in WAYS.values():
            assert_equal(model, texts(), **way, max_new_tokens=ALL)
        assert reasons(model) == []
        assert max(step.capacity for step in held(model)) == ALL
        assert len({id(step.encoded) for step in held(model) if step.batch.rows == 3}) == 1


@pytest.mark.parametrize("name", ["t5", "bart", "m2m100", "whisper"])
def test_what_comes_again_is_captured_whole(name: str) -> None:
    """The encoder from its third call on, the first tokens from their second; with other inputs of the same shapes."""
    model = patched(name)
    for place in range(5):
        given = {key: one.roll(place, -1) if one.is_floating_point() else one for key, one in given_to(name).items()}
        if "input_ids" in given:
            given["input_ids"] = (given["input_ids"] + place) % 150 * given["attention_mask"]
        assert_equal(model, given)
    every = model.accelpatch.report().paths
    assert every[CALL] == 3
    assert every[CAPTURED_PROMPT] == 4
    assert_equal(model, given, return_dict_in_generate=False, num_beams=2)
    mine, its = both(model, given, return_dict_in_generate=True)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for layer, other in zip(getattr(mine[CACHE], part).layers, getattr(its[CACHE], part).layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-5)
    assert mine[CACHE].is_updated == its[CACHE].is_updated


def test_a_streamer_gets_every_token() -> None:
    model, streamer = patched("t5"), Calling()
    made = model.generate(**texts(rows=1), max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert torch.equal(torch.cat(streamer.taken), made[0])


@pytest.mark.parametrize("rows, kept", [([1, 0, 3, 3], True), ([2, 1, 0, 3], False)], ids=["in a text", "across"])
def test_keys_of_the_encoder_are_copied_only_where_rows_of_other_texts_move(rows: list[int], kept: bool) -> None:
    model, results = patched("bart", eos_token_id=None), []
    given = {key: value.repeat_interleave(2, 0) for key, value in texts(rows=2).items()}
    with torch.no_grad():
        for runner in (model, stock(model)):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            states, mask = runner.get_encoder()(**given), given["attention_mask"]
            for place in range(6):
                ids = torch.full((4, 1), 7 + place) + torch.arange(4)[:, None]
                call = {"decoder_input_ids": ids, "encoder_outputs": states, "attention_mask": mask, CACHE: cache}
                logits = runner(**call, use_cache=True).logits
                if runner is model and place:
                    contents = cache.cross_attention_cache.layers[0]._contents
                    assert isinstance(contents, CrossContents)
                    assert (contents.texts is not None) == (kept or place == 1)
                cache.reorder_cache(torch.tensor(rows))
            results.append(logits)
            results.append(cache.cross_attention_cache.layers[1].keys)
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1], results[3], rtol=1e-4, atol=1e-5)
    assert steps(model) == 5


class OtherCache(DynamicCache):
    """A cache that may do what it likes."""


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"use_cache": False}, "synchronised devices, an assistant, or no cache"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attentions or hidden states were asked for"),
        ({"other": True}, "the cache is a OtherCache"),
        ({"hook": True}, "a hook on an inner module"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)
def test_what_runs_the_stock_loop_says_why(change: dict[str, Any], reason: str) -> None:
    model, change = patched("bart"), dict(change)
    if change.pop("hook", False):
        model.model.decoder.layers[1].fc1.register_forward_hook(lambda module, args, out: None)
    if change.pop("other", False):
        change[CACHE] = EncoderDecoderCache(OtherCache(), DynamicCache())
    mine, its = both(model, {**texts(), **change})
    mine, its = (one if isinstance(one, Tensor) else one.sequences for one in (mine, its))
    assert torch.equal(mine, its)
    assert reasons(model) == [reason]
    assert steps(model) == 0


def test_a_model_whose_decoder_shows_masked_slots_runs_the_stock_loop() -> None:
    """LED makes no mask for a single token."""
    torch.manual_seed(0)
    _, _, config = FAMILIES["bart"]
    shape = {**config, "attention_window": 8, "max_encoder_position_embeddings": 64}
    model = transformers.LEDForConditionalGeneration(transformers.LEDConfig(**shape)).eval()
    accelpatch.patch(model, "exact", verify=False)
    assert_equal(model, texts())
    assert reasons(model) == ["its steps attend to slots of the cache that the mask hides"]


def test_a_changed_weight_is_seen() -> None:
    model = patched("bart")
    before = assert_equal(model, texts())
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.k_proj.weight.mul_(-1)
    assert not torch.equal(assert_equal(model, texts()), before)
    assert steps(model) == 2 * (NEW - 1)
    accelpatch.unpatch(model)
    assert model.generate(**texts(), max_new_tokens=3).shape[1] <= 4
