"""For tests of code that others put in the place of transformers' or torch's: changes, and what is alike."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import accelpatch
from accelpatch.fusion.fused_model import FUSED
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import CAUSAL, padded_batch

NEW = 6


def patched(recipe: str = "exact", name: str = "llama") -> tuple[Any, Any]:
    """(plain, patched) models with the same weights, after a first call."""
    plain, model = CAUSAL[name].make(), CAUSAL[name].make()
    accelpatch.patch(model, recipe, verify=False)
    last_logits(model)
    return plain, model


def scaled(function: Any, factor: float) -> Any:
    """A function whose output, or its first tensor, is multiplied."""

    @functools.wraps(function)
    def other(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if isinstance(made, tuple):
            return factor * made[0], *made[1:]
        if hasattr(made, "logits"):
            made.logits = factor * made.logits
            return made
        if hasattr(made, "last_hidden_state"):
            made.last_hidden_state = factor * made.last_hidden_state
            return made
        return factor * made

    return other


def steps(model: Any) -> int:
    """How many steps ran by the native code or by fused layers, since the last look."""
    paths = model.accelpatch.report().paths
    found = sum(count for name, count in paths.items() if name in (NATIVE, CAPTURED) or name.startswith(FUSED))
    paths.clear()
    return int(found)


def last_logits(model: Any) -> Tensor:
    made = model.generate(
        **padded_batch(), max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    logits: Tensor = made.logits[-1]
    return logits


@torch.no_grad()
def assert_alike(model: Any, plain: Any, batch: dict[str, Tensor]) -> None:
    """Logits of a call, of steps of a program's own, and of generate() in two ways are those of the plain model."""
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-4, atol=1e-4)
    for options in ({}, {"num_beams": 2}):
        given = {**batch, "max_new_tokens": NEW, "do_sample": False, "output_logits": True, **options}
        found, due = (one.generate(**given, return_dict_in_generate=True) for one in (model, plain))
        assert found.sequences.tolist() == due.sequences.tolist()
        torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-4)
