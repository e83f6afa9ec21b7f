"""Continuous batching on a GPU: transformers' graphs hold the fused layers, and give each request its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.runtime.continuous.step import CONTINUOUS
from tests.runtime.continuous.test_families import agrees, options, prompts
from tests.support.tiny import CAUSAL

NEAR = 0.05  # of the two highest scores, in bfloat16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("recipe", ["exact", "int8"])
def test_graphs_hold_the_fused_layers(recipe: str) -> None:
    asked = prompts(5, 17, 9, 30, 2, 11)
    model: Any = accelpatch.patch(CAUSAL["llama"].make(torch.bfloat16).cuda(), recipe, verify=False)
    given = options()
    given["continuous_batching_config"].use_cuda_graph = True
    for kept in (False, True, True):
        done = model.generate_batch(asked, **given, persistent_manager=kept)
        for prompt, one in zip(asked, done.values(), strict=True):
            assert agrees(model, prompt, one.generated_tokens, NEAR)
    ways = [way for way in model.accelpatch.report().paths if way.startswith(CONTINUOUS)]
    assert ways == [f"{CONTINUOUS}, fused layers"]
