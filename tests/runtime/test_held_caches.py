"""What a program holds of a KV cache (layers, copies, tensors) stays what it was, as over an unpatched model."""

from __future__ import annotations

import copy
from operator import is_
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_contents import attached
from accelpatch.runtime.generation.patched_model import RUNTIME
from tests.runtime.test_caches import NAMES, assert_same, begun, fewer_heads, given, steps_of
from tests.support.drafting import as_on_a_gpu
from tests.support.tiny import CAUSAL, full_batch


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_was_taken_of_a_cache_stays_its_own(name: str, machine: str) -> None:
    def run(model: Any) -> tuple[list[Any], list[Any]]:
        cache = begun(model, 0)
        layers, held, pair, twin = cache.layers, cache.layers[1], list(cache.layers), copy.copy(cache)
        other = DynamicCache()
        other.layers = [cache.layers[0]]
        seen: list[Any] = []
        for step in range(3):
            given(model, cache, 1, 5 + step)
            seen += [layers is cache.layers, all(map(is_, pair, cache.layers)), twin.layers[1] is held]
            seen += [held.get_seq_length(), held.get_mask_sizes(2), twin.get_seq_length(), other.get_seq_length()]
            seen += [held.is_sliding, isinstance(held, DynamicLayer), repr(held), held.is_initialized]
        ids = torch.cat((full_batch()["input_ids"], torch.tensor([[5, 6, 7, 9]] * 3)), 1)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **{CACHE: cache})
        seen += [cache.layers[1] is held, twin.get_seq_length()]
        tensors = [held.keys, twin.layers[0].values, other.layers[0].keys, given(model, twin, 1, 8), held.values]
        return seen, [one.clone() for one in tensors]

    model = CAUSAL[name].make()
    seen, tensors = run(model)
    patched = accelpatch.patch(model, "exact", verify=False)
    mine = run(patched)
    assert mine[0] == seen
    assert_same(mine[1], tensors)
    assert steps_of(patched) >= 4


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_were_read_do_not_change(name: str, machine: str) -> None:
    """Whatever the cache is used for later, as stock's: each update makes new ones."""
    model = accelpatch.patch(CAUSAL[name].make(), "exact", verify=False)
    cache, taken = begun(model), []
    for step in range(3):
        taken += [one for layer in cache.layers for one in (layer.keys, layer.values)]
        given(model, cache, 1, 9 + step)
    copies = [one.clone() for one in taken]
    rows = torch.tensor([2, 0, 0])
    for change in (lambda: cache.reorder_cache(rows), lambda: cache.batch_select_indices(rows), cache.reset):
        given(model, cache, 1, 8)
        change()
        begun(model)
        assert all(map(torch.equal, taken, copies))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_reading_keys_keeps_native_steps_where_they_are(name: str) -> None:
    model = accelpatch.patch(CAUSAL[name].make(), "exact", verify=False)
    cache = begun(model)
    if steps_of(model) == 0:
        pytest.skip("no native library")
    contents = attached(cache)
    for step in range(3):
        assert all(len(one) == 3 for layer in cache.layers for one in (layer.keys, layer.values))
        given(model, cache, 1, 9 + step)
        assert attached(cache) is contents


def test_odd_heads_of_a_layer_teach_a_model_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second layer runs as a module, so that no fused layer says what that one caches."""
    as_on_a_gpu(monkeypatch)
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    vars(model)[RUNTIME].unfuse({1: "in this test"})
    with torch.no_grad():
        cache = begun(model, 0)
        fewer_heads(cache)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            given(model, cache, 1, 9)
        due = steps_of(model)
        begun(model)
    assert steps_of(model) == due + 2
