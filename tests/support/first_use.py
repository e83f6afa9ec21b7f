"""Contexts in which models are patched at their first use, and what is said of them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch
from tests.support.packed import replacements
from tests.support.tiny import CAUSAL, full_batch

IDS = full_batch()["input_ids"]


class Said:
    """What was said of models: (its class, the reason), or "patched"."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def left(self, model: nn.Module, reason: str) -> None:
        self.lines.append((type(model).__name__, reason))

    def patched(self, model: nn.Module) -> None:
        self.lines.append((type(model).__name__, "patched"))


@contextmanager
def first_use(recipe: str = "int8") -> Iterator[list[tuple[str, str]]]:
    said = Said()
    options: dict[str, Any] = {"verify": False, "on_patched": said.patched, "on_left": said.left}
    with torch.no_grad(), accelpatch.patch_on_first_use(recipe, **options):
        yield said.lines


def patched_alike(model: Any = None, recipe: str = "int8") -> Tensor:
    model = accelpatch.patch(model or CAUSAL["llama"].make(), recipe, verify=False)
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def is_patched(model: nn.Module) -> bool:
    return "accelpatch" in vars(model) and bool(replacements(model))


@contextmanager
def on_demand(recipe: str) -> Iterator[list[str]]:
    """The reasons why models were left or unpatched."""
    said: list[str] = []
    with accelpatch.patch_on_first_use(recipe, verify=False, on_left=lambda one, why: said.append(why)):
        yield said
