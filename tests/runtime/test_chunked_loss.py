"""`loss: chunked`: the loss and the gradients of the whole, without all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import accelpatch
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.chunked_loss import chunked_cross_entropy
from tests.support.lora import config, peft
from tests.support.tiny import CAUSAL, full_batch

WHOLE = "extends: {}\nruntime: {{loss: whole}}\n"
CHUNKED = "extends: {}\nruntime: {{loss: chunked}}\n"
#: with a softcap, a divisor, a bias in the head, learned positions, experts, and the plain ones
FAMILIES = ("llama", "gemma2", "granite", "cohere", "phi", "gpt2", "qwen3_moe")
OTHERS = ("bloom", "opt", "gptj")  # whose logits are not known to be plain


def model_of(family: str, text: str, base: str = "exact", **changes: Any) -> Any:
    model = accelpatch.patch(CAUSAL[family].make(), parse(text.format(base)), verify=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config(**changes)).train()
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return adapted


def batch() -> dict[str, torch.Tensor]:
    """Two rows without labels at the beginning, one without any."""
    given = full_batch()
    labels = given["input_ids"].clone()
    labels[:2, :4], labels[2] = -100, -100
    return given | {"labels": labels}


def results(model: Any, **more: Any) -> tuple[Any, list[Any]]:
    outputs = model(**batch(), **more)
    outputs.loss.backward()
    return outputs, [one.grad for one in model.parameters() if one.requires_grad]


@pytest.mark.each_value
@pytest.mark.parametrize("items", [None, 7], ids=["mean", "of-all-batches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_the_gradients_are_those_of_the_whole(family: str, items: int | None) -> None:
    more = {} if items is None else {"num_items_in_batch": items}
    (due, wanted), (made, found) = (results(model_of(family, text), **more) for text in (WHOLE, CHUNKED))
    assert made.logits is None
    assert due.logits is not None
    torch.testing.assert_close(made.loss, due.loss, rtol=1e-5, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}],
                         ids=["saved-head", "adapted-head"])  # fmt: skip
def test_a_head_that_trains(changes: dict[str, Any]) -> None:
    (due, wanted), (made, found) = (results(model_of("qwen2", text, "int8", **changes)) for text in (WHOLE, CHUNKED))
    torch.testing.assert_close(made.loss, due.loss, rtol=1e-5, atol=0)
    assert any(one.shape[0] == 160 for one in found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", OTHERS)
def test_models_whose_logits_may_be_scaled_have_their_own_loss(family: str) -> None:
    assert results(model_of(family, CHUNKED))[0].logits is not None


def test_logits_come_outside_of_training_where_they_are_asked_for_and_with_hooks() -> None:
    model = model_of("llama", CHUNKED)
    assert model(**batch()).logits is None
    assert model(**full_batch()).logits is not None
    assert model(**batch(), output_hidden_states=True).logits is not None
    with torch.no_grad():
        assert model(**batch()).logits is not None
    handle = model.get_base_model().lm_head.register_forward_hook(lambda *args: None)
    assert model(**batch()).logits is not None
    handle.remove()
    assert model.eval()(**batch()).logits is not None


def test_no_more_than_a_chunk_of_logits_is_made() -> None:
    """And the float64 gradient is right whatever the chunk is."""
    generator, seen = torch.Generator().manual_seed(3), []
    x, w = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((23, 8), (31, 8)))
    w.requires_grad_()
    labels = torch.randint(0, 31, (23,), generator=generator)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows @ w.t()

    x.requires_grad_()
    due = torch.autograd.grad(functional.cross_entropy(x @ w.t(), labels, reduction="sum"), [x, w])
    found = torch.autograd.grad(chunked_cross_entropy(logits, x, labels, [w], 5), [x, w])
    assert seen == [5, 5, 5, 5, 3]
    for one, other in zip(found, due, strict=True):
        torch.testing.assert_close(one, other)
