"""Calls that come again as one graph: short prompts of language models, whole calls of models that do not generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, DynamicCache, ViTConfig, ViTForImageClassification

import accelpatch
from accelpatch.kernels.fused_product import Product
from accelpatch.runtime.captured_call import CALL, MOST, RUNS
from accelpatch.runtime.patched_model import RUNTIME
from tests.runtime.steps import stock
from tests.runtime.test_fused_layer import RECIPES, _as_on_a_gpu, patched, paths  # noqa: F401

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert(recipe: str = "exact") -> Any:
    torch.manual_seed(0)
    return accelpatch.patch(BertForMaskedLM(BertConfig(vocab_size=120, **SIZES)).eval(), RECIPES[recipe], verify=False)


def text(rows: int, length: int, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def short(model: Any) -> list[tuple[int, int]]:
    """Rows and length of the captured prompts."""
    prompts = vars(model)[RUNTIME]._prompts
    return [key for key, one in prompts._held.items() if one.captured]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_prompts_that_come_again(recipe: str, rows: int) -> None:
    model = patched("llama", recipe)
    plain = stock(model)
    for length in (5, 9, 32, 1, 1, 40, 64, 33, 120):
        ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(length))
        found, due = model(ids), plain(ids)
        torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-5)
        pairs = (model, found), (plain, due)
        more = [one(ids[:, :2], past_key_values=outputs.past_key_values).logits for one, outputs in pairs]
        torch.testing.assert_close(*more, rtol=1e-4, atol=1e-5)
    assert short(model) == [(rows, 32), (rows, 1), (rows, 64)]


@torch.no_grad()
def test_a_prompt_that_cannot_be_captured_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched(), torch.randint(2, 100, (1, 9))

    def failing(program: Any) -> Any:
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(vars(model)[RUNTIME], "graph", lambda device: failing)
    due = stock(model)(ids).logits
    for _ in range(4):
        torch.testing.assert_close(model(ids).logits, due, rtol=1e-4, atol=1e-5)
    assert short(model) == []


def test_products_of_single_calls_wait_for_nobody() -> None:
    """A kernel that waits for one that does not signal its columns takes a thousand times as long."""
    model = patched("llama", intermediate_size=8192)
    fused, _ = vars(model)[RUNTIME].fused(model)
    signals = [one for layer in fused.layers for one in (layer.qkv, layer.gate_up, layer.down)]
    assert any(one.producer for one in signals)
    assert any(one.consumer for one in signals)
    silent = [one for layer in fused.layers for one in vars(layer.without_signals).values() if isinstance(one, Product)]
    assert not any(one.producer or one.consumer for one in silent)


@torch.no_grad()
def test_what_was_given_back_stays() -> None:
    model, ids = patched(), torch.randint(2, 100, (2, 9))
    held = [model(ids) for _ in range(3)]
    kept = [(one.logits.clone(), one.past_key_values.layers[0].keys.clone()) for one in held]
    for _ in range(2):
        model(ids + 1)
        model(ids + 2, past_key_values=DynamicCache())
    for one, (logits, keys) in zip(held, kept, strict=True):
        assert torch.equal(one.logits, logits)
        assert torch.equal(one.past_key_values.layers[0].keys, keys)
    assert torch.equal(held[0].logits, held[2].logits)


@torch.no_grad()
def test_a_weight_that_is_written_between_prompts_is_seen() -> None:
    model, ids = patched(), torch.randint(2, 100, (1, 9))
    for _ in range(3):
        model(ids)
    model.model.layers[0].mlp.down_proj.weight.mul_(-2)
    torch.testing.assert_close(model(ids).logits, stock(model)(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_of_an_encoder_that_come_again(recipe: str, mode: Any) -> None:
    model = bert(recipe)
    plain = stock(model)
    for turn in range(5):
        for padded in (False, True):
            batch = text(2, 16, padded, turn)
            for options in ({}, {"labels": batch["input_ids"]}, {"output_hidden_states": True}, {"return_dict": False}):
                with mode():
                    found, due = model(**batch, **options), plain(**batch, **options)
                assert type(found) is type(due)
                mine, its = (one if isinstance(one, tuple) else one.to_tuple() for one in (found, due))
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    assert paths(model)[CALL] == 4 * (10 - RUNS)


def test_calls_that_no_graph_can_run() -> None:
    model = bert()
    batch = text(1, 8)
    for _ in range(RUNS + 2):
        model(**batch)  # its parameters want a gradient
    with torch.no_grad():
        for _ in range(RUNS + 2):
            model(inputs_embeds=nn.Parameter(torch.randn(1, 8, 128)))
        handle = model.bert.encoder.layer[0].register_forward_hook(lambda module, args, out: None)
        for _ in range(RUNS + 2):
            model(**batch)
        handle.remove()
        model.train()
        for _ in range(RUNS + 2):
            model(**batch)
    assert CALL not in paths(model)


@torch.no_grad()
def test_an_encoder_that_is_changed_between_calls() -> None:
    model, batch = bert(), text(1, 8)
    for _ in range(RUNS + 2):
        model(**batch)
    assert paths(model)[CALL] == 2
    layer = model.bert.encoder.layer[0].output.dense
    for change in (lambda: layer.weight.mul_(-2), lambda: setattr(layer, "weight", nn.Parameter(layer.weight * -1))):
        change()
        for _ in range(RUNS + 1):
            torch.testing.assert_close(model(**batch).logits, stock(model)(**batch).logits, rtol=1e-4, atol=1e-5)
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    model(**batch)
    assert len(seen) == 1


@torch.no_grad()
def test_graphs_are_few_and_failures_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    for length in range(1, MOST + 5):
        for _ in range(RUNS + 1):
            model(**text(1, length))
    assert paths(model)[CALL] == MOST
    broken = bert()
    runtime = vars(broken)[RUNTIME]
    tried: list[int] = []

    def failing(program: Any) -> Any:
        tried.append(1)
        raise RuntimeError("it asks the host")

    monkeypatch.setattr(runtime, "graph", lambda device: failing)
    for length in range(1, 12):
        for _ in range(RUNS + 2):
            assert broken(**text(1, length)).logits.isfinite().all()
    assert len(tried) == 4
    assert paths(broken)["no captured call: RuntimeError: it asks the host"] == 4


@torch.no_grad()
def test_images() -> None:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **SIZES)).eval()
    accelpatch.patch(model, "int8", verify=False)
    plain = stock(model)
    for _ in range(RUNS + 2):
        image = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(model(image).logits, plain(image).logits, rtol=1e-4, atol=1e-5)
    assert paths(model)[CALL] == 2
