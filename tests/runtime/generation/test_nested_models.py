"""Models that hold other models, on demand: what a call asks for is decided once, where it begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, pipeline

import accelpatch
from tests.support.first_use import on_demand
from tests.support.lora import adapted
from tests.support.nested import bart, gemma3, llava, t5, two_texts, with_picture, with_typed_picture
from tests.support.packed import replacements
from tests.support.tiny import CAUSAL, full_batch

RECIPES = ("exact", "int8", "flash")
#: a model and the arguments of a call
NESTED: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "llava": (llava, with_picture),
    "gemma3": (gemma3, with_typed_picture),
    "bart": (bart, two_texts),
    "t5": (t5, two_texts),
}


def patched_alike(made: Callable[[], Any], recipe: str, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a patched model, whose calls run with no gradient wanted."""
    model = accelpatch.patch(made(), recipe, verify=False)
    with torch.no_grad():
        found: Tensor = model(**batch).logits
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NESTED)
def test_embeddings_that_the_model_made_are_no_request(name: str, recipe: str) -> None:
    made, batch = NESTED[name]
    due = patched_alike(made, recipe, batch())
    model = made()
    with on_demand(recipe) as said:
        for _ in range(2):
            torch.testing.assert_close(model(**batch()).logits, due, rtol=1e-4, atol=1e-4)
    assert said == []
    assert hasattr(model, "accelpatch")


class Outer(type(CAUSAL["llama"].make())):  # type: ignore[misc]
    """A model that holds another one, and gives it labels of its own making."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scorer = CAUSAL["gpt2"].make()

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        made = super().forward(input_ids, **kwargs)
        made.loss = self.scorer(input_ids, labels=input_ids).loss
        return made


class Generating(Outer):
    """A model that generates within its forward."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        self.scorer.generate(input_ids, max_new_tokens=2, do_sample=False)
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("cls", [Outer, Generating], ids=["labels", "generate"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_outer_model_gives_the_inner_one_is_no_request(cls: Any, recipe: str) -> None:
    torch.manual_seed(0)
    model, ids = cls(CAUSAL["llama"].make().config).eval(), full_batch()["input_ids"]
    with on_demand(recipe) as said:
        found = [model(ids) for _ in range(2)]
        assert said == []
        assert hasattr(model, "accelpatch")
        torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=0)
        model(ids, labels=ids).loss.backward()
    assert said == ["unpatched, since the script asked for a gradient"]
    assert all(one.grad is not None for one in model.scorer.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_on_the_instance_is_within_the_call(recipe: str) -> None:
    """As accelerate puts one there; it calls the class's own, past the patched one."""
    model, due = llava(), patched_alike(llava, recipe, with_picture())
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with on_demand(recipe) as said:
        for _ in range(2):
            torch.testing.assert_close(model(**with_picture()).logits, due, rtol=1e-5, atol=1e-6)
    assert said == []
    assert hasattr(model, "accelpatch")


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_that_train_are_no_request(recipe: str) -> None:
    model = adapted(CAUSAL["llama"].make())
    assert any(parameter.requires_grad for parameter in model.parameters())
    with on_demand(recipe) as said:
        model(**full_batch())
        model(**full_batch())
        assert said == []
        assert hasattr(model, "accelpatch")
        model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()
    assert said == ["unpatched, since the script asked for a gradient"]
    assert any(parameter.grad is not None for name, parameter in model.named_parameters() if "lora" in name)


def _labels(model: Any) -> None:
    ids = with_picture()["input_ids"]
    model(**with_picture(), labels=ids).loss.backward()


def _labels_by_position(model: Any) -> None:
    ids = with_picture()["input_ids"]
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    given = [None] * names.index("labels")
    model(ids, with_picture()["pixel_values"], *given[2:], ids).loss.backward()


def _embeddings(model: Any) -> None:
    x = model.get_input_embeddings()(torch.tensor([[5, 7, 9]])).detach().requires_grad_()
    model(inputs_embeds=x).logits.sum().backward()
    assert x.grad is not None


def _pixels(model: Any) -> None:
    batch = with_picture()
    pixels = batch.pop("pixel_values").requires_grad_()
    model(**batch, pixel_values=pixels).logits.sum().backward()
    assert pixels.grad is not None


def _of_a_part(model: Any) -> None:
    x = torch.randn(1, 3, 64, requires_grad=True)
    model.model.language_model(inputs_embeds=x).last_hidden_state.sum().backward()
    assert x.grad is not None


REQUESTS = {
    "labels": _labels, "labels by position": _labels_by_position, "embeddings": _embeddings, "pixels": _pixels,
    "of a part": _of_a_part,
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["exact", "flash"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_script_that_asks_for_a_gradient_gets_one(request_: Callable[[Any], None], recipe: str) -> None:
    model = llava()
    with on_demand(recipe) as said:
        model(**with_picture())
        assert hasattr(model, "accelpatch")
        request_(model)
    assert said == ["unpatched, since the script asked for a gradient"]
    assert replacements(model) == []


def test_gradient_checkpointing_unpatches_where_it_trains() -> None:
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    with on_demand("flash") as said:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # a hook: the embeddings require a gradient, the script's tensors do not
        model(ids)
        model(ids)
        assert said == []
        model.train()
        model(ids, labels=ids).loss.backward()
    assert said == ["unpatched, since the script asked for training mode"]
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


class Words:
    """A tokenizer of numbers, as much of one as a pipeline asks for."""

    model_max_length, padding_side, pad_token_id, is_fast = 32, "right", 0, True

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}


@pytest.mark.parametrize("recipe", RECIPES)
def test_pipelines(recipe: str) -> None:
    def made() -> Any:
        config = BertConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                            intermediate_size=96)  # fmt: skip
        torch.manual_seed(0)
        return BertForSequenceClassification(config).eval()

    due = pipeline("text-classification", model=accelpatch.patch(made(), recipe, verify=False), tokenizer=Words())(
        "5 6"
    )
    model = made()
    with on_demand(recipe) as said:
        found = pipeline("text-classification", model=model, tokenizer=Words())("5 6")
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in due], abs=1e-6)
    assert said == []
    assert hasattr(model, "accelpatch")


def test_another_model_of_the_class_is_a_plain_one() -> None:
    model, ids = CAUSAL["llama"].make(), full_batch()["input_ids"]
    with on_demand("exact") as said:
        model.generate(ids, max_new_tokens=2, do_sample=False)
        other = type(model)(model.config).train()
        other(ids, labels=ids).loss.backward()
        assert len(other.state_dict()) == len(list(other.parameters())) + ("lm_head.weight" in other.state_dict())
    assert "unpatched" not in " ".join(said)
    assert hasattr(model, "accelpatch")
