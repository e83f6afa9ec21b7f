"""Planted outlier channels: int8 activations alone lose by them, and smoothing gives the loss of a model without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.recipe.recipe import parse
from tests.support.simulated import logits
from tests.support.smoothing import calibrated
from tests.support.tiny import CAUSAL, full_batch

BOUND = "verify: {bound: 99}\n"  # all that is asked for, however far it is
PLAIN = parse(f"name: plain\nextends: smoothquant\ncalibrate: {{alpha: null}}\n{BOUND}")
SMOOTH = parse(f"name: smooth\nextends: smoothquant\n{BOUND}")
SEARCH = parse(f"name: search\nextends: smoothquant\ncalibrate: {{alpha: search}}\n{BOUND}")
CHANNELS = (3, 17, 40)


def model(name: str, outliers: bool) -> Any:
    """Channels of the norms before attention and MLP that are 100 times as large, and whose readers have weights that
    are as much smaller: the function of the model without them."""
    made: Any = CAUSAL[name].make()
    if not outliers:
        return made
    channels = list(CHANNELS)
    with torch.no_grad():
        for layer in made.model.layers:
            for norm, readers in (
                (layer.input_layernorm, [getattr(layer.self_attn, f"{one}_proj") for one in "qkv"]),
                (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                norm.weight[channels] *= 100
                for reader in readers:
                    reader.weight[:, channels] /= 100
    return made


def divergence(made: Any, recipe: Any, due: Tensor) -> float:
    """Mean KL divergence of the patched model's next tokens."""
    accelpatch.patch(made, recipe, verify=False, statistics=calibrated(made))
    after = logits(made, full_batch(40)).log_softmax(-1)
    before = due.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3"])
def test_smoothing_undoes_outliers(name: str) -> None:
    due = logits(model(name, False), full_batch(40))
    torch.testing.assert_close(logits(model(name, True), full_batch(40)), due, rtol=1e-3, atol=1e-4)
    without = divergence(model(name, False), SMOOTH, due)
    broken = divergence(model(name, True), PLAIN, due)
    assert broken > 20 * without
    assert divergence(model(name, True), SMOOTH, due) < 2 * without
    assert divergence(model(name, True), SEARCH, due) < 2 * without
