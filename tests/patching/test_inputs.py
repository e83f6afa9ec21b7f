"""Inputs for verification: the user's own, left as they are, and those that are made for a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, DynamicCache, StaticCache

import accelpatch
from accelpatch.errors import ArgumentError
from accelpatch.models.inputs import sample_inputs
from tests.models.test_class_rules import build
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, VOCABULARY, full_batch, padded_batch, snapshot


def filled(model: nn.Module, cache: Any) -> Any:
    """A cache that holds four tokens of three rows."""
    with torch.no_grad():
        model(input_ids=full_batch()["input_ids"][:, :4], past_key_values=cache, use_cache=True)
    return cache


def continuing(model: nn.Module, cache: Any) -> dict[str, Any]:
    return {"input_ids": full_batch()["input_ids"][:, 4:6], "past_key_values": filled(model, cache), "use_cache": True}


INPUTS: dict[str, Any] = {
    "ids": lambda model: {"input_ids": full_batch()["input_ids"]},
    "no-cache": lambda model: full_batch() | {"use_cache": False},
    "with-cache": lambda model: full_batch() | {"use_cache": True},
    "padded": lambda model: padded_batch(),
    "encoding": lambda model: BatchEncoding(padded_batch()),
    "embeddings": lambda model: {"inputs_embeds": torch.randn(2, 5, 64)},
    "filled-cache": lambda model: continuing(model, DynamicCache(config=model.config)),
    "static-cache": lambda model: continuing(model, StaticCache(config=model.config, max_cache_len=16)),
    "hidden-states": lambda model: full_batch() | {"output_hidden_states": True},
    "tuple-output": lambda model: full_batch() | {"return_dict": False},
}


def contents(value: Any) -> Any:
    """A value as plain data, a cache by its layers."""
    if isinstance(value, Tensor):
        return value.tolist()
    if hasattr(value, "layers"):
        return [(contents(layer.keys), contents(layer.values), int(layer.get_seq_length())) for layer in value.layers]
    return value


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_the_user_are_used_and_stay_as_they_are(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = CAUSAL[name].make()
    with torch.no_grad():
        model(**full_batch(), output_hidden_states=True)  # transformers leaves its own hooks, from the first such call
    before = snapshot(model)
    sample = INPUTS[kind](model)
    given = copy.deepcopy({key: contents(value) for key, value in sample.items()})
    identities = {key: id(value) for key, value in sample.items()}
    accelpatch.patch(model, "int8", inputs=[sample])
    report = model.accelpatch.report()
    assert {key: contents(value) for key, value in sample.items()} == given
    assert {key: id(value) for key, value in sample.items()} == identities
    assert report.verification.failures == []
    assert {site.path for site in report.sites if site.unverified} == set()
    if kind == "tuple-output":  # without names there are no logits to compare
        assert report.verification.kl is None
    else:
        tokens = {"padded": 23, "encoding": 23, "embeddings": 10, "filled-cache": 6, "static-cache": 6}
        assert report.verification.tokens == tokens.get(kind, 27)
        assert 0 < report.verification.kl < 0.1
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_several_inputs_are_all_used() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", inputs=[full_batch(), padded_batch(), {"input_ids": torch.tensor([[3]])}])
    assert model.accelpatch.report().verification.tokens == 27 + 23 + 1


def test_a_site_that_no_input_reaches_says_so() -> None:
    """T5's decoder alone, on what its encoder gave before."""
    model = build("t5")
    hidden = model.encoder(input_ids=full_batch()["input_ids"])
    sample = {"encoder_outputs": hidden, "decoder_input_ids": full_batch()["input_ids"][:, :3]}
    accelpatch.patch(model, "int8", inputs=[sample])
    sites = {site.path: site for site in model.accelpatch.report().sites if site.replacer}
    encoder = [site for path, site in sites.items() if path.startswith("encoder.block")]
    assert {site.unverified for site in encoder} == {"no input reached it"}
    assert {site.format_error for site in encoder} == {None}
    assert {site.unverified for path, site in sites.items() if path.startswith("decoder.block")} == {None}


def test_an_input_that_the_model_refuses() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    with pytest.raises(IndexError):
        accelpatch.patch(model, "int8", inputs=[{"input_ids": torch.tensor([[VOCABULARY + 7]])}])
    assert snapshot(model) == before
    assert logits(model, padded_batch()).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit"])
def test_made_inputs_are_fixed_and_have_the_shapes_of_generation(name: str) -> None:
    model = CAUSAL[name].make() if name in CAUSAL else build(name)
    first, second = sample_inputs(model)[0], sample_inputs(model)[0]
    for one, two in zip(first, second, strict=True):
        assert {key: contents(value) for key, value in one.items()} == {key: contents(v) for key, v in two.items()}
    if name == "vit":
        assert [tuple(batch["pixel_values"].shape) for batch in first] == [(1, 3, 16, 16), (2, 3, 16, 16)]
        return
    shapes = [tuple(batch["input_ids"].shape) for batch in first]
    assert shapes == [(1, 1), (1, 12), (3, 12)]
    assert all(0 <= int(batch["input_ids"].min()) <= int(batch["input_ids"].max()) < 160 for batch in first)
    assert first[2]["attention_mask"].sum(1).tolist() == [12, 6, 12]
    with torch.no_grad():
        for batch in first:
            assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


@pytest.mark.parametrize("vocabulary", [1, 2, 7])
def test_made_inputs_stay_below_a_small_vocabulary(vocabulary: int) -> None:
    model = CAUSAL["llama"].make(vocab_size=vocabulary, pad_token_id=0, bos_token_id=0)
    assert max(int(batch["input_ids"].max()) for batch in sample_inputs(model)[0]) < vocabulary
    accelpatch.patch(model, "int8")


def test_a_context_shorter_than_the_made_inputs() -> None:
    """GPT-2's positions are a table: twelve tokens do not fit eight."""
    model = CAUSAL["gpt2"].make(n_positions=8)
    accelpatch.patch(model, "int8")
    assert model.accelpatch.report().verification.failures == []


def test_a_single_sample_is_one() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "exact", inputs={"input_ids": torch.tensor([[3, 4, 5]])})
    assert model.accelpatch.report().verification.failures == []


@pytest.mark.parametrize("inputs", [torch.tensor([[1, 2]]), "a text", [1, 2], [], 7])
def test_what_is_no_sample_is_refused(inputs: Any) -> None:
    model = CAUSAL["llama"].make()
    with pytest.raises(ArgumentError, match="it takes a list of samples"):
        accelpatch.patch(model, "exact", inputs=inputs)
    assert not hasattr(model, "accelpatch")
