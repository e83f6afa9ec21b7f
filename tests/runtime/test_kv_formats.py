"""`runtime: kv_cache`: steps over a cache in 8 bits give what the model gives over a cache that rounds like it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import accelpatch
from accelpatch.errors import RecipeError
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cached import Cached
from accelpatch.kernels.layouts.kv_states import QuantizedStates
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.generation.speculation import ACCEPTED
from accelpatch.runtime.graphs.kv_cache import CapturedLayer
from accelpatch.runtime.graphs.step import CAPTURED
from accelpatch.runtime.quantized_cache import TAKEN
from tests.support.drafting import as_on_a_gpu
from tests.support.drafting import pair as with_lookup
from tests.support.rounded_cache import RoundingCache, rounded
from tests.support.tiny import CAUSAL, full_batch, padded_batch

FORMS = ["int8", "fp8", "bf16"]
NAMES = ["llama", "mistral", "gemma3"]  # full attention, windows of 5 tokens, and both
STEPS = 12


def pair(name: str, form: str, more: str = "") -> tuple[Any, Any]:
    """A tiny model, and the same patched."""
    model = CAUSAL[name].make()
    recipe = {"extends": "exact", "runtime": {"kv_cache": form, **({"speculate": more} if more else {})}}
    return copy.deepcopy(model), accelpatch.patch(model, recipe, verify=False)


@torch.no_grad()
def steps_of(model: Any, batch: dict[str, Tensor], cache: Any, steps: int = STEPS) -> Tensor:
    """Logits [B, 1 + steps, V] of a fixed continuation over `cache`."""
    mask, positions = batch["attention_mask"], (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    out = model(batch["input_ids"], attention_mask=mask, position_ids=positions, **{CACHE: cache})
    found = [out.logits[:, -1]]
    for step in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        places = mask.sum(1, keepdim=True) - 1
        ids = torch.full((len(mask), 1), 3 + 7 * step)
        found.append(model(ids, attention_mask=mask, position_ids=places, **{CACHE: cache}).logits[:, -1])
    return torch.stack(found, 1)


def of_steps(model: Any) -> int:
    paths = model.accelpatch.report().paths
    return sum(count for path, count in paths.items() if path in (NATIVE, CAPTURED))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [full_batch(), padded_batch()], ids=["full", "padded"])
def test_steps(machine: str, name: str, form: str, batch: dict[str, Tensor]) -> None:
    plain, model = pair(name, form)
    due = steps_of(plain, batch, RoundingCache(plain.config, form, skipped=1))
    mine = steps_of(model, batch, DynamicCache(config=model.config))
    floats = steps_of(plain, batch, DynamicCache(config=plain.config))
    assert of_steps(model) == STEPS
    if name == "llama":  # a window's first tokens, which stock drops, were rounded with it in a static cache alone
        assert (mine - due).abs().max() < 0.2 * (floats - due).abs().max(), "it rounds, and as the formula says"
    torch.testing.assert_close(mine, due, rtol=0, atol=0.05 * float((floats - due).abs().max()) + 1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_generated_text(machine: str, form: str) -> None:
    """generate() has a prompt of its own on a GPU, which attends to what the cache holds."""
    plain, model = pair("llama", form)
    batch, options = padded_batch(), {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(**batch, **options, output_logits=True)
    cache = RoundingCache(plain.config, form, skipped=machine == "cpu")
    due = plain.generate(**batch, **options, output_logits=True, past_key_values=cache)
    assert of_steps(model) == 9
    torch.testing.assert_close(torch.stack(made.logits), torch.stack(due.logits), rtol=0, atol=2e-3)
    assert torch.equal(made.sequences, due.sequences)


@pytest.mark.parametrize("form", FORMS)
def test_the_cache_comes_back_in_floats(machine: str, form: str) -> None:
    _, model = pair("llama", form)
    batch = full_batch()
    made = model.generate(**batch, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    for layer in made[CACHE].layers:
        for one in (layer.keys, layer.values):
            assert type(one) is Tensor
            assert one.dtype == torch.float32
            torch.testing.assert_close(rounded(one, form).float(), one, rtol=1e-6, atol=0)
    again = model.generate(made.sequences, past_key_values=made[CACHE], max_new_tokens=6, do_sample=False)
    whole = model.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert again.shape == whole.shape


@pytest.mark.parametrize("form", FORMS)
def test_tokens_lie_in_8_bits(machine: str, form: str) -> None:
    _, model = pair("llama", form)
    cache = DynamicCache(config=model.config)
    steps_of(model, full_batch(), cache, 2)
    held = cache.layers[0]._contents.static.layers[0]
    assert isinstance(held.keys, QuantizedStates)
    assert held.values.format == form


def test_a_batch_is_reordered(machine: str) -> None:
    """Beam search moves rows of the cache, codes and scales."""
    plain, model = pair("llama", "int8")
    mine, its = DynamicCache(config=model.config), RoundingCache(plain.config, "int8", skipped=1)
    first = [steps_of(one, full_batch(), cache, 3) for one, cache in ((model, mine), (plain, its))]
    rows = torch.tensor([2, 0, 0])
    for cache in (mine, its):
        cache.reorder_cache(rows)
    with torch.no_grad():
        last = [one(torch.full((3, 1), 9), **{CACHE: cache}).logits for one, cache in ((model, mine), (plain, its))]
    torch.testing.assert_close(first[0], first[1], rtol=0, atol=2e-3)
    torch.testing.assert_close(last[0], last[1], rtol=0, atol=2e-3)


def test_a_cache_that_grows(machine: str) -> None:
    plain, model = pair("llama", "int8")
    batch = full_batch(250)
    due = steps_of(plain, batch, RoundingCache(plain.config, "int8", skipped=1), 20)
    mine = steps_of(model, batch, DynamicCache(config=model.config), 20)
    assert of_steps(model) == 20
    torch.testing.assert_close(mine, due, rtol=0, atol=5e-3)


def test_nan_keys_stay(machine: str) -> None:
    """A row of keys with a NaN is NaN where it is seen, as over a float cache."""
    _, model = pair("llama", "int8")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(full_batch()["input_ids"], **{CACHE: cache})
        cache.layers[1].keys[1, :, 4, 0] = float("nan")
        logits = model(torch.full((3, 1), 9), **{CACHE: cache}).logits
    assert logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


def test_a_copy_has_the_same_format(machine: str) -> None:
    _, model = pair("llama", "fp8")
    made = copy.deepcopy(model)
    assert vars(made)[RUNTIME]._settings == vars(model)[RUNTIME]._settings
    assert "fp8" in vars(made)[RUNTIME]._settings


def test_an_unknown_format() -> None:
    with pytest.raises(RecipeError, match=r"kv_cache.*int8"):
        accelpatch.patch(CAUSAL["llama"].make(), {"extends": "exact", "runtime": {"kv_cache": "int4"}})


# transformers' own quantised cache, asked for by a script
ASKED: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "quantized"}


@pytest.mark.parametrize("config, form", [({"backend": "fp8"}, "fp8"), ({"backend": "hqq", "nbits": 8}, "int8")])
def test_a_quantized_cache_in_8_bits_is_ours(machine: str, config: dict[str, Any], form: str) -> None:
    _, model = pair("llama", "auto")
    _, due = pair("llama", form)
    batch = padded_batch()
    before = model.generate(**batch, max_new_tokens=8, do_sample=False)
    made = model.generate(**batch, **ASKED, cache_config=config)
    wanted = due.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(made, wanted)
    assert torch.equal(before, model.generate(**batch, max_new_tokens=8, do_sample=False))
    assert of_steps(model) == 3 * 7
    assert model.accelpatch.report().paths[TAKEN.format(form)] == 1


def test_a_quantized_cache_in_4_bits_stays_stock_s(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("llama", "auto")

    class QuantizedCache(DynamicCache):
        """In place of transformers', which needs a package."""

        def __init__(self, backend: str, config: Any, **given: Any):
            super().__init__(config=config)
            assert (backend, given) == ("quanto", {"nbits": 4})

    monkeypatch.setattr("transformers.generation.utils.QuantizedCache", QuantizedCache)
    model.generate(**full_batch(), **ASKED, cache_config={"backend": "quanto", "nbits": 4})
    assert of_steps(model) == 0
    assert any("groups of 2 or 4 bits" in path for path in model.accelpatch.report().paths)


def test_without_steps_a_quantized_cache_stays_stock_s() -> None:
    """Else the tokens would lie in floats."""
    model = accelpatch.patch(CAUSAL["gpt2"].make(), "exact", verify=False)
    assert not vars(model)[RUNTIME].takes_format(model)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_prompt_lookup(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and the same cache, bit for bit, with draft tokens as without."""
    as_on_a_gpu(monkeypatch)
    drafting, plain = with_lookup(more=f", kv_cache: {form}")
    ids = torch.randint(2, 90, (1, 30), generator=torch.Generator().manual_seed(2)).repeat(1, 2)
    given = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mine, due = (model.generate(ids, **given) for model in (drafting, plain))
    assert torch.equal(mine.sequences, due.sequences)
    assert all(torch.equal(one, other) for one, other in zip(mine.logits, due.logits, strict=True))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(mine[CACHE].layers, due[CACHE].layers, strict=True))
    assert drafting.accelpatch.report().paths[ACCEPTED] > 0


def test_a_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a prompt is cut changes nothing: every part attends to what the cache holds."""
    as_on_a_gpu(monkeypatch)
    _, model = pair("llama", "int8")
    batch, given = full_batch(40), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    made = [
        model.generate(**batch, **given, prefill_chunk_size=size, output_logits=True, return_dict_in_generate=True)
        for size in (None, 16, 7)
    ]
    for one in made[1:]:
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(made[0].logits), rtol=0, atol=2e-3)


def test_a_cache_of_codes_stays_as_it_is() -> None:
    """SmoothQuant's OPT caches int8 codes with static scales of its own: the layout of a float model is none for it."""
    layer = CapturedLayer(Cached(0, 2, (8, 8), torch.int8, torch.device("cpu")), 1, 16, torch.zeros(1).long(), "fp8")
    assert layer.keys.dtype == torch.int8
    assert type(layer.keys) is Tensor
