"""A patched model on another GPU than the current one, and two models on two GPUs in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.steps import assert_float_rule, logits, stock
from tests.support.tiny import CAUSAL, full_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
RECIPES = ("exact", "int8", "int4")
NEW = 24


@pytest.fixture(autouse=True)
def _first_gpu_is_current() -> Any:
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def patched(name: str, recipe: str, device: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return accelpatch.patch(CAUSAL[name].make(dtype).to(f"cuda:{device}"), recipe, **options)


@pytest.mark.parametrize("make", [full_batch, padded_batch], ids=["one-length", "left-padding"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_logits_of_fused_layers(name: str, recipe: str, make: Any) -> None:
    assert_float_rule(patched(name, recipe, 1, verify=False), make())


@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_of_every_family(name: str) -> None:
    model = patched(name, "exact", 1, torch.float32)
    plain = stock(model)
    for do_sample in (False, True):
        made = []
        for one in (model, plain):
            torch.manual_seed(3)
            batch = {key: value.to("cuda:1") for key, value in padded_batch().items()}
            made.append(one.generate(**batch, max_new_tokens=NEW, do_sample=do_sample))
        assert torch.equal(*made)
    assert model.accelpatch.report().paths[CAPTURED] == 2 * (NEW - 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_models_in_turn(recipe: str) -> None:
    """Of two equal GPUs both give the same bits, whichever of them went first."""
    if len({torch.cuda.get_device_name(index) for index in (0, 1)}) > 1:
        pytest.skip("the two GPUs are of different kinds")
    models = [patched("llama", recipe, index) for index in (0, 1)]
    found = [logits(models[index], padded_batch(), 32).cpu() for index in (1, 0, 1, 0)]
    assert all(torch.equal(one, found[0]) for one in found[1:])
    accelpatch.unpatch(models[0])  # and the other goes on
    assert torch.equal(logits(models[1], padded_batch(), 32).cpu(), found[0])
