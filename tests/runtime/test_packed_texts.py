"""Texts packed into one row, by their positions: each is as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.kernels.ops.attention.mask import texts_of
from accelpatch.modules import attention
from tests.support.lora import RECIPES
from tests.support.tiny import CAUSAL, VOCABULARY

LENGTHS = (7, 12, 5)
FAMILIES = ("llama", "mistral", "gemma3", "qwen3", "phi3", "gpt_neox", "qwen3_moe")


def packed() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(2, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return texts, {"input_ids": torch.cat(texts, 1), "position_ids": positions}


@pytest.mark.parametrize("recipe", ["int8", "flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_has_the_logits_and_gradients_that_it_has_alone(family: str, recipe: str) -> None:
    model = accelpatch.patch(CAUSAL[family].make(), RECIPES.get(recipe, "flash"), verify=False).train()
    texts, row = packed()
    together = model(**row, use_cache=False).logits
    together.square().mean().backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    alone = torch.cat([model(input_ids=text, use_cache=False).logits for text in texts], 1)
    alone.square().mean().backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    for name, one in model.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(found[name], one.grad, rtol=1e-3, atol=1e-5)


def test_attention_is_asked_for_the_lengths_once_and_holds_no_square_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "flash", verify=False).train()
    asked: list[Any] = []
    monkeypatch.setattr(attention, "texts_of", lambda ranges: asked.append(texts_of(ranges)) or asked[-1])
    monkeypatch.setattr(attention, "combined", lambda *args: pytest.fail("a mask was made"))
    model(**packed()[1], use_cache=False).logits.sum().backward()
    assert asked == [list(LENGTHS)]


@pytest.mark.parametrize(
    "ranges, due",
    [
        pytest.param([[0, 1], [0, 2], [2, 3]], [2, 1], id="two-texts"),
        pytest.param([[0, 1], [0, 2], [0, 3]], [3], id="one-text"),
        pytest.param([[0, 1], [0, 2], [1, 3]], None, id="a-window"),
        pytest.param([[0, 3], [0, 3], [0, 3]], None, id="both-ways"),
        pytest.param([[0, 0], [1, 2], [1, 3]], None, id="padding"),
    ],
)
def test_which_masks_are_those_of_packed_texts(ranges: list[list[int]], due: list[int] | None) -> None:
    assert texts_of(torch.tensor([ranges], dtype=torch.int32)) == due
