"""Calls that come again as one graph: short prompts of language models, whole calls of models that do not generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import accelpatch
from accelpatch.errors import KernelError
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import calls, capture
from accelpatch.runtime.graphs.calls import CALL, RUNS
from accelpatch.runtime.graphs.model_graphs import GraphMemory
from tests.fusion.test_fused_layer import RECIPES, _as_on_a_gpu, patched, paths  # noqa: F401
from tests.support.steps import stock

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert(recipe: str = "exact") -> Any:
    torch.manual_seed(0)
    model = accelpatch.patch(BertForMaskedLM(BertConfig(vocab_size=120, **SIZES)).eval(), RECIPES[recipe], verify=False)
    vars(model)[RUNTIME].padding = "keep"  # as a GPU does for so few places
    return model


def text(rows: int, length: int, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def short(model: Any) -> list[tuple[int, int]]:
    """Rows and length of the captured prompts."""
    prompts = vars(model)[RUNTIME].captured._prompts
    return [key for key, one in prompts._captured.items() if one._graph is not None]


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

    monkeypatch.setattr(GraphMemory, "graph", lambda self, device: failing)
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
    silent = [
        one for layer in fused.layers for one in vars(layer.without_signals).values() if isinstance(one, FusedLinear)
    ]
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
    assert paths(model)[CALL] == 4 * 2 * (5 - RUNS)  # without padding they run without a mask


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
def test_the_graphs_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 3)
    model = bert()
    for length in range(1, 6):
        for _ in range(RUNS + 1):
            model(**text(1, length))
    assert paths(model)[CALL] == 5
    for length in (5, 4, 3, 1):
        model(**text(1, length))
    assert paths(model)[CALL] == 8
    monkeypatch.setattr(calls, "LARGEST", 1000)
    for _ in range(RUNS + 3):
        model(**text(1, 9))
    assert paths(model)[CALL] == 8


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, torch.OutOfMemoryError])
@torch.no_grad()
def test_what_cannot_be_captured_is_answered_by_the_modules(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    tried: list[int] = []

    def failing(program: Any) -> Any:
        tried.append(1)
        raise error("it asks the host")

    with monkeypatch.context() as patch:
        patch.setattr(GraphMemory, "graph", lambda self, device: failing)
        for _ in range(RUNS + 3):
            assert model(**text(1, 7)).logits.isfinite().all()
    assert len(tried) == 1
    assert CALL not in paths(model)


@torch.no_grad()
def test_errors_of_the_caller_do_not_keep_a_call_from_its_graph() -> None:
    model, batch = bert(), text(1, 7)
    for _ in range(RUNS + 2):
        with pytest.raises(IndexError):
            model(**batch | {"input_ids": batch["input_ids"] + 100000})
    for _ in range(2):
        assert model(**batch).logits.isfinite().all()
    assert paths(model)[CALL] == 2


@torch.no_grad()
def test_a_configuration_inside_and_a_forward_of_the_users_own() -> None:
    model, batch = bert(), text(1, 8)
    model.bert.encoder.config = copy.deepcopy(model.config)
    for _ in range(RUNS + 2):
        model(**batch)
    before = vars(model)[RUNTIME].captured._calls
    model.bert.encoder.config.layer_norm_eps = 0.5
    model(**batch)
    assert vars(model)[RUNTIME].captured._calls is not before

    class Own(BertForMaskedLM):
        def forward(self, **given: Any) -> Any:
            seen.append(1)
            return super().forward(**given)

    seen: list[int] = []
    own = accelpatch.patch(Own(BertConfig(vocab_size=120, **SIZES)).eval(), "exact", verify=False)
    for _ in range(RUNS + 4):
        own(**batch)
    assert len(seen) == RUNS + 4


def test_a_gradient_goes_through_a_long_or_padded_prompt() -> None:
    model, ids = patched(), torch.randint(2, 100, (2, 9))
    scale, mask = torch.ones((), requires_grad=True), torch.ones_like(ids)
    mask[0, :3] = 0
    for given in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": torch.randint(2, 100, (1, 520))}):
        model.zero_grad(set_to_none=True)
        (model(**given, labels=given["input_ids"]).loss * scale).backward()
        assert all(one.grad is not None for one in model.parameters())


@torch.no_grad()
def test_ids_that_no_prompt_has() -> None:
    model, ids = patched(), torch.randint(2, 100, (1, 9))
    due = stock(model)(ids).logits
    with pytest.raises(RuntimeError, match="Long, Int"):
        model(ids.float())
    with pytest.raises(KernelError, match="move the module"):
        model(ids.to("meta"))
    for _ in range(3):
        torch.testing.assert_close(model(ids).logits, due, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError):
        model(ids, input_ids=ids)


def test_a_graph_keeps_what_it_reads_of_others() -> None:
    cached, own = torch.ones(3), torch.zeros(3)
    with capture._Captured() as seen:
        made = torch.cat([own + 1, torch.ones(2)]) * 2
        own.add_(made[:3] * cached)
    assert {id(one) for one in seen.outside} == {id(cached), id(own)}


def test_a_model_of_linear_layers_alone() -> None:
    class Two(PreTrainedModel):
        config_class = BertConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.one, self.two = (nn.Linear(64, 64, bias=False) for _ in range(2))
            self.post_init()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    model = accelpatch.patch(Two(BertConfig()).eval(), "int8", verify=False)
    with torch.no_grad():
        assert model(torch.randn(2, 64)).shape == (2, 64)


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
