"""One more token by a captured step over transformers' cache: whose the tokens are, whatever is done with the cache."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import accelpatch
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.cache_contents import attached
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.fused_forward import FORWARD
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.model_graphs import CapturedModel
from accelpatch.runtime.graphs.step import CAPTURED
from tests.fusion.test_fused_layer import _as_on_a_gpu, patched, paths  # noqa: F401
from tests.runtime.graphs.test_fused_forward import assert_close, more
from tests.support.spread import spread
from tests.support.steps import stock
from tests.support.tiny import CAUSAL, full_batch, padded_batch

NAMES = ("llama", "mistral", "qwen3", "gemma2", "gemma3")  # of which three have layers with a sliding window
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(autouse=True)
def _no_gradient() -> Any:
    with torch.no_grad():
        yield


def begun(model: Any, batch: dict[str, Tensor], cache: Any = None) -> Any:
    """A cache with the batch's tokens and 20 more, one by one: more than a window of the tiny models."""
    cache = model(**batch, past_key_values=cache).past_key_values
    for _ in range(20):
        batch = more(batch, 1)
        model(**batch, past_key_values=cache)
    return cache, batch


def goes_on(model: Any, batch: dict[str, Tensor], cache: Any, count: int = 1) -> Tensor:
    logits: Tensor = model(**more(batch, count), past_key_values=cache).logits
    return logits


def tensors(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@spread("name, batch", NAMES, ["full", "padded"])
def test_tokens_one_by_one_are_those_of_the_modules(name: str, batch: str) -> None:
    model, given = patched(name), {"full": full_batch, "padded": padded_batch}[batch]()
    due, longer = begun(stock(model), given)
    cache, _ = begun(model, given)
    assert attached(cache) is not None
    assert paths(model)[CAPTURED] == 20
    assert_close(goes_on(model, longer, cache), goes_on(stock(model), longer, due))
    assert cache.get_seq_length() == due.get_seq_length()
    if not (name == "gemma2" and batch == "padded"):  # whose eager attention gives padding the mean of all values
        assert_close(tensors(cache), tensors(due))


def _pickled(cache: Any) -> Any:
    held = io.BytesIO()
    torch.save(cache, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def _read(cache: Any) -> Any:
    assert all(layer.keys.shape[2] and layer.values.shape[2] for layer in cache.layers)
    return cache


def _written(cache: Any) -> Any:
    cache.layers[1].values = cache.layers[1].values * 2
    return cache


def _written_in_place(cache: Any) -> Any:
    cache.layers[0].keys.mul_(2)
    return cache


def _by(method: str, *given: Any) -> Callable[[Any], Any]:
    def changed(cache: Any) -> Any:
        getattr(cache, method)(*given)
        return cache

    return changed


# what a program does with the cache in between -> the same on a plain cache
BETWEEN: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": _pickled,
    "read": _read,
    "written": _written,
    "written-in-place": _written_in_place,
    "reordered": _by("reorder_cache", torch.tensor([2, 2, 0])),
    "cropped": _by("crop", -2),
}


@spread("name, between", ["llama", "mistral"], [*BETWEEN])
def test_whatever_is_done_with_the_cache(name: str, between: str) -> None:
    windows = {"sliding_window": 64} if name == "mistral" else {}  # a window that is passed cannot be cropped
    model, results = patched(name, **windows), []
    for one in (model, stock(model)):
        cache, batch = begun(one, full_batch())
        cache = BETWEEN[between](cache)
        length = cache.get_seq_length()
        batch = {key: value[:, -1:] if key == "input_ids" else value[:, :length] for key, value in batch.items()}
        results.append([goes_on(one, batch, cache), *tensors(cache)])
    assert_close(*results)


def test_two_caches_in_turn_keep_their_own_tokens() -> None:
    model = patched()
    plain, batches = stock(model), (full_batch(), padded_batch())
    pairs = [(begun(model, batch), begun(plain, batch)) for batch in batches]
    for _ in range(2):
        for (cache, longer), (due, _) in pairs:
            assert_close(goes_on(model, longer, cache), goes_on(plain, longer, due))
            cache.crop(-1)
            due.crop(-1)


def test_generate_takes_the_step_and_leaves_the_cache_its_tokens() -> None:
    model = patched()
    cache, batch = begun(model, full_batch())
    due, _ = begun(stock(model), full_batch())
    model.generate(**padded_batch(), **GREEDY)
    assert attached(cache) is None
    assert_close(goes_on(model, batch, cache), goes_on(stock(model), batch, due))


def test_a_cache_that_grows_beyond_the_step() -> None:
    model, batch = patched(), full_batch()
    cache = model(**batch).past_key_values
    due = stock(model)(**batch).past_key_values
    plain = stock(model)
    for _ in range(5):
        batch = more(batch, 49)
        model(**batch, past_key_values=cache)
        plain(**batch, past_key_values=due)
    for _ in range(4):
        batch = more(batch, 1)
        assert_close(model(**batch, past_key_values=cache).logits, plain(**batch, past_key_values=due).logits)
    contents = attached(cache)
    assert contents is not None
    assert contents.static.layers[0].keys.shape[2] == 512


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_those_of_the_modules(name: str) -> None:
    model = patched(name)
    given = {**padded_batch(), "num_beams": 3, **GREEDY}
    assert torch.equal(model.generate(**given), stock(model).generate(**given))
    assert paths(model)[CAPTURED] >= 20


@pytest.mark.parametrize("places", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_layers_with_hooks_alone_run_their_modules(name: str, places: list[int]) -> None:
    model, plain, seen = patched(name, num_hidden_layers=4), None, []
    plain = stock(model)
    for place in places:
        model.model.layers[place].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert torch.equal(model.generate(**full_batch(), **GREEDY), plain.generate(**full_batch(), **GREEDY))
    assert len(seen) == 24 * len(places)  # a hook sees each token once, the prompt's among them
    way = f"fused layers, but modules in layers {places}: a hook inside"
    assert paths(model)[way] == 23


def test_what_a_hook_returns_is_used() -> None:
    model = patched("llama", num_hidden_layers=4)
    plain = stock(model)
    for one in (model, plain):
        one.model.layers[2].register_forward_hook(lambda module, args, out: out * 1.5)
    assert_close(begun_logits(model), begun_logits(plain))
    assert paths(model)[CAPTURED] == 21


def begun_logits(model: Any) -> Tensor:
    cache, batch = begun(model, full_batch())
    return goes_on(model, batch, cache)


def test_a_hook_that_reads_the_cache_loses_no_token() -> None:
    model = patched("llama", num_hidden_layers=4)
    plain = stock(model)
    (cache, batch), (due, _) = begun(model, full_batch()), begun(plain, full_batch())
    seen: list[Tensor] = []
    model.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(cache.layers[0].keys))
    for _ in range(3):
        assert_close(goes_on(model, batch, cache), goes_on(plain, batch, due))
        batch = more(batch, 1)
        assert cache.get_seq_length() == due.get_seq_length()
    assert_close(tensors(cache), tensors(due))


@pytest.mark.parametrize("rows", [[1], [0, 1], [2, 1, 0], [0, 0, 1, 1, 2, 2]], ids=str)
def test_rows_of_any_number(rows: list[int]) -> None:
    model, results = patched(), []
    for one in (model, stock(model)):
        cache, _ = begun(one, full_batch())
        cache.reorder_cache(torch.tensor(rows))
        ids = torch.full((len(rows), 1), 7)
        results.append([one(input_ids=ids, past_key_values=cache).logits, *tensors(cache)])
    assert_close(*results)


def test_beyond_the_recipes_length_nothing_is_captured_anew() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), parse("extends: exact\nruntime: {max_length: 64}"), verify=False)
    plain, batch = stock(model), full_batch(60)
    cache, due = (one(**batch).past_key_values for one in (model, plain))
    for _ in range(8):
        batch = more(batch, 1)
        mine, its = (one(**batch, past_key_values=held).logits for one, held in ((model, cache), (plain, due)))
        assert_close(mine, its)
    assert [capacity for _, capacity, *_ in vars(model)[RUNTIME].captured._steps] == [64]


def test_a_hook_that_comes_and_goes() -> None:
    model = patched("llama", num_hidden_layers=4)
    cache, batch = begun(model, full_batch())
    plain, seen = stock(model), []
    due, _ = begun(plain, full_batch())
    handle = model.model.layers[3].self_attn.register_forward_pre_hook(lambda *given: seen.append(1))
    assert_close(goes_on(model, batch, cache), goes_on(plain, batch, due))
    assert seen == [1]
    handle.remove()
    batch = more(batch, 1)
    assert_close(goes_on(model, batch, cache), goes_on(plain, batch, due))
    assert seen == [1]


def test_a_hook_on_the_model_sees_every_call_and_steps_are_captured() -> None:
    model, seen = patched(), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.logits.shape))
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    assert torch.equal(model.generate(**full_batch(), **GREEDY), plain.generate(**full_batch(), **GREEDY))
    assert paths(model)[CAPTURED] == 23


def test_a_hidden_new_token_runs_no_step() -> None:
    model = patched()
    cache, batch = begun(model, full_batch())
    due, _ = begun(stock(model), full_batch())
    batch = more(batch, 1)
    batch["attention_mask"][0, -1] = 0
    before = paths(model)[CAPTURED]
    mine, its = (one(**batch, past_key_values=held) for one, held in ((model, cache), (stock(model), due)))
    assert_close(mine.logits[1:], its.logits[1:])
    assert paths(model)[CAPTURED] == before


def test_no_memory_for_a_step_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (torch.OutOfMemoryError("planted"), NotCaptured("planted")):
        model, tried = patched(), []

        def none(*given: Any, error: Any = error, tried: Any = tried) -> Any:
            tried.append(1)
            raise error

        monkeypatch.setattr(CapturedModel, "step", none)
        cache, _ = begun(model, full_batch())
        assert attached(cache) is None
        assert paths(model) == {FORWARD: 21}
        assert len(tried) <= 2  # and not again for each token


def test_an_unpatched_model_goes_on_with_the_cache() -> None:
    model = patched()
    cache, batch = begun(model, full_batch())
    due, plain = begun(stock(model), full_batch())[0], stock(model)
    accelpatch.unpatch(model)
    assert_close(goes_on(model, batch, cache), goes_on(plain, batch, due))


def test_an_empty_cache_and_another_batch_size() -> None:
    model = patched()
    ids = full_batch()["input_ids"][:, :1]
    assert_close(
        model(input_ids=ids, past_key_values=DynamicCache(config=model.config)).logits,
        stock(model)(input_ids=ids, past_key_values=DynamicCache(config=model.config)).logits,
    )
    cache, _ = begun(model, full_batch())
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        model(input_ids=ids[:1].repeat(2, 1), past_key_values=cache)
