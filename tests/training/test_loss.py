"""A small task learnt around rounded weights: the loss is near that of the unpatched model, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from tests.support.lora import RECIPES, config, peft
from tests.support.tiny import CAUSAL, VOCABULARY

ROWS, LENGTH = 8, 16
SEEDS, SHORT, LONG = 3, 20, 100  # of steps
MOST = {"exact": 0.001, "int8": 0.02, "int4": 0.05, "train": 0.05}  # relative distance of losses


def rows(step: int, seed: int = 0) -> torch.Tensor:
    """Texts that count up, each from a number of its own: the next token follows from the last."""
    first = torch.randint(2, 40, (ROWS, 1), generator=torch.Generator().manual_seed(1000 * seed + step))
    return first + torch.arange(LENGTH)


def loss_of(model: Any, steps: int = SHORT, packed: bool = False, seed: int = 0) -> float:
    """The mean loss of the last steps of training adapters around a model."""
    torch.manual_seed(11 + seed)
    adapted = peft.get_peft_model(model, config(rank=8, init_lora_weights=True)).train()
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        ids = rows(step, seed)
        if packed:  # the first token of a text follows from nothing
            labels = ids.clone()
            labels[:, 0] = -100
            given = {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "use_cache": False}
            given["position_ids"] = torch.arange(LENGTH).repeat(ROWS)[None]
        else:
            given = {"input_ids": ids, "labels": ids}
        loss = adapted(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 1.5
    return sum(losses[-5:]) / 5


@pytest.fixture(scope="module")
def unpatched() -> float:
    return loss_of(CAUSAL["llama"].make())


def patched(recipe: str) -> Any:
    return accelpatch.patch(CAUSAL["llama"].make(), RECIPES.get(recipe, recipe), verify=False)


@pytest.mark.parametrize("recipe", MOST)
def test_the_loss_is_near_that_of_the_unpatched_model(recipe: str, unpatched: float) -> None:
    assert loss_of(patched(recipe)) == pytest.approx(unpatched, rel=MOST[recipe])


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", MOST)
def test_after_a_hundred_steps_as_the_mean_of_three_seeds(recipe: str) -> None:
    due = sum(loss_of(CAUSAL["llama"].make(), LONG, seed=seed) for seed in range(SEEDS))
    found = sum(loss_of(patched(recipe), LONG, seed=seed) for seed in range(SEEDS))
    assert found == pytest.approx(due, rel=MOST[recipe])


def test_packed_rows_learn_as_separate_ones() -> None:
    assert loss_of(patched("train"), packed=True) == pytest.approx(loss_of(patched("train")), rel=0.005)
    assert VOCABULARY > 40 + LENGTH
