"""The rows of the table in docs/patched-models.md, and what the functions that run them share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import accelpatch
from tests.support.lora import config, peft
from tests.support.packed import plain, replacements
from tests.support.simulated import logits
from tests.support.tiny import full_batch

DOC = Path(__file__).parents[2] / "docs" / "patched-models.md"
ROWS = re.findall(r"^\| (?!what is done|---)(.*?) \|", DOC.read_text(), re.MULTILINE)
RUN: dict[str, Callable[[Any, str, Path], None]] = {}


def row(start: str) -> Callable[[Callable[[Any, str, Path], None]], Callable[[Any, str, Path], None]]:
    """Registers what runs the row whose first cell begins so; given a patched model, its format and a folder."""

    def register(function: Callable[[Any, str, Path], None]) -> Callable[[Any, str, Path], None]:
        (name,) = [one for one in ROWS if one.startswith(start)]
        assert name not in RUN
        RUN[name] = function
        return function

    return register


def stock(form: str) -> Any:
    return plain("llama", form, tie_word_embeddings=False)


def out(model: Any) -> torch.Tensor:
    return logits(model, full_batch()).float()


def off(one: Any, other: Any) -> float:
    return float((out(one) - out(other)).norm() / out(other).norm())


def undo(model: Any) -> None:
    """Unpatch, and nothing of the patch is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelpatch.unpatch(model)
    assert replacements(model) == []


def adapted(model: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(target_modules=["q_proj", "v_proj"], **changes)).eval()


REACH = {"exact": 1e-3, "int8": 0.1, "int4": 0.8, "fp8": 0.3, "compact": 0.05}
