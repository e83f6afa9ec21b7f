"""The fingerprint of a model's weights: the same in bfloat16 and float32, another for other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch.models.fingerprint import fingerprint
from tests.support.checkpoints import opened
from tests.support.tiny import CAUSAL


def test_one_checkpoint_in_two_dtypes(tmp_path: Path) -> None:
    for name, dtype in (("floats", torch.float32), ("halves", torch.bfloat16)):
        CAUSAL["llama"].make(dtype).save_pretrained(tmp_path / name)
        one, other = (opened(tmp_path / name, dtype=into) for into in (torch.float32, torch.bfloat16))
        assert fingerprint(one) == fingerprint(other)


def _row(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[0].add_(1)


def _norm(model: Any) -> None:
    model.model.norm.weight[0] += 0.1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a-row": _row,
    "a-norm": _norm,
    "layers-swapped": lambda model: model.model.layers.append(model.model.layers.pop(0)),
    "a-layer-fewer": lambda model: model.model.layers.pop(1),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in CHANGES.items()])
def test_other_weights(change: Callable[[Any], Any]) -> None:
    model = CAUSAL["llama"].make()
    before = fingerprint(model)
    assert before == fingerprint(CAUSAL["llama"].make())
    with torch.no_grad():
        change(model)
    assert fingerprint(model) != before


def test_strides_do_not_count() -> None:
    model = CAUSAL["llama"].make()
    before = fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert fingerprint(model) == before
