"""KV caches of models whose layers have heads of their own: changed between steps, and given to another model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from tests.runtime.test_caches import CHANGES, assert_same, begun, caches, given, steps_of
from tests.support.resized import SIZES
from tests.support.tiny import CAUSAL

OTHER_HEADS = ("pruned-heads", "one-key-head", "as-many-key-heads", "more-heads")


def resized(size: str, place: int) -> Any:
    """A model of which the layer at `place` has other heads than the other one."""
    model: Any = CAUSAL["llama"].make()
    layers = model.model.layers
    SIZES[size](SimpleNamespace(model=SimpleNamespace(layers=[layers[place], layers[1 - place]])))
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("change", ["cropped", "reordered", "selected", "a shorter layer", "layers exchanged"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("size", OTHER_HEADS)
def test_what_is_done_to_a_cache(size: str, place: int, change: str, machine: str) -> None:
    its = caches(resized(size, place), CHANGES[change])
    patched = accelpatch.patch(resized(size, place), "exact", verify=False)
    assert_same(caches(patched, CHANGES[change]), its)
    assert steps_of(patched) >= 2


@pytest.mark.each_value
@torch.no_grad()
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("size", ["one-key-head", "as-many-key-heads"])
def test_a_cache_of_another_model(size: str, place: int, back: bool, machine: str) -> None:
    """Of which one layer alone differs: that one says so, as it does unpatched, and the cache is whole for its own."""

    def found(patched: bool) -> list[Any]:
        models = [CAUSAL["llama"].make(), resized(size, place)][:: -1 if back else 1]
        if patched:
            models = [accelpatch.patch(one, "exact", verify=False) for one in models]
        own, other = models
        seen: list[Tensor | Exception] = []
        for steps in (0, 2):
            cache = begun(own, steps)
            for model in (other, own):
                try:
                    seen.append(given(model, cache, 1, 9))
                except RuntimeError as error:
                    seen.append(error)
        return seen

    assert_same(found(True), found(False))
