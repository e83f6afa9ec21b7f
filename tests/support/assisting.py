"""Assistants beside target models, for tests of drafts that a model makes on a CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation import drafter
from tests.support.drafting import RULES, repeating


def target(name: str = "llama", rules: str = "exact", more: str = "") -> Any:
    """A patched model."""
    text = f"extends: {rules}\nruntime: {{speculate: 'off'{more}}}\n{RULES[rules]}"
    return accelpatch.patch(repeating(name), parse(text), verify=False)


def assistant(name: str = "llama", wrong: float = 0.0, number: int = 5, patched: bool = True, **settings: Any) -> Any:
    """A model of the same weights, with noise of width `wrong`; it is sure of each token."""
    model = repeating(name)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(wrong * parameter.std() * torch.randn(parameter.shape, generator=draw))
    settings = {"num_assistant_tokens": number, "assistant_confidence_threshold": 0.0, **settings}
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    return accelpatch.patch(model, "exact", verify=False) if patched else model


def paced(monkeypatch: pytest.MonkeyPatch, numbers: Iterator[int] | None = None) -> None:
    """Each round drafts so many tokens, as far as it may; as many as it may where nothing is given."""

    def chosen(pace: Any, most: int) -> int:
        return max(min(most, most if numbers is None else next(numbers)), 0)

    monkeypatch.setattr(drafter.Pace, "next", chosen)


def mixed() -> Iterator[int]:
    """Numbers of drafts, plain steps among them: one, and more than the draft model is caught up with in one step."""
    return itertools.cycle([5, 7, 0, 1, 3, 0, 0, 0, *[0] * 11, 2, 7, 6, 0, 0])


def exact_copy(model: Any) -> Any:
    """A copy of a model, patched or not."""
    return copy.deepcopy(model)
