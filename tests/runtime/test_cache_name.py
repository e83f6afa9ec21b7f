"""Every name that transformers has for the KV cache takes the fast paths, with its warnings alone: none of ours."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

import accelpatch
from accelpatch.bench.generate import cached_bytes
from accelpatch.device import probe
from accelpatch.fusion.cache_name import CACHE, FORMER
from accelpatch.kernels.compiling import libraries
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.graphs.fused_forward import FORWARD
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.drafting import as_on_a_gpu
from tests.support.steps import stock
from tests.support.tiny import CAUSAL, full_batch

reason = libraries.why_not("cpu", probe("cpu"))
native = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
only_one = pytest.mark.skipif(CACHE == FORMER, reason="transformers before 5.24 has one name")
names = pytest.mark.parametrize("name", [pytest.param(FORMER, id="former"), pytest.param("cache", marks=only_one)])
NEW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def _no_warning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers warns of the former name in arguments, and logs it where outputs are made or read."""
    logged: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, text, *args, **kwargs: logged.append(text))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        yield
    assert not [text for text in logged if FORMER in text]


def warned(name: str) -> Any:
    """What transformers says of a name of the KV cache in arguments."""
    if name == CACHE:
        return contextlib.nullcontext()
    return pytest.warns(FutureWarning, match=f"`{FORMER}` is deprecated .* for `[A-Za-z0-9]*[.]forward`")


def patched(name: str = "llama") -> Any:
    return accelpatch.patch(CAUSAL[name].make(), "exact", verify=False)


def paths(model: Any) -> dict[str, int]:
    return dict(model.accelpatch.report().paths)


def steps(model: Any, name: str) -> list[Tensor]:
    """Logits of a prompt and three more tokens over one cache, and what that holds at the end."""
    held = DynamicCache(config=model.config)
    found = [model(full_batch()["input_ids"], **{name: held}).logits]
    found += [model(torch.full((3, 1), token), **{name: held}).logits for token in (5, 6, 7)]
    return found + [layer.keys for layer in held.layers]


def assert_steps_of_the_modules(model: Any, name: str) -> None:
    with warned(name):
        found = steps(model, name)
    for mine, its in zip(found, steps(stock(model), CACHE), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@native
@pytest.mark.smoke
@names
def test_native_steps(name: str) -> None:
    model = patched()
    assert_steps_of_the_modules(model, name)
    assert paths(model)[NATIVE] == 3


@pytest.mark.smoke
@names
def test_fused_and_captured_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = patched()
    assert_steps_of_the_modules(model, name)
    assert (paths(model)[FORWARD], paths(model)[CAPTURED]) == (1, 3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@names
def test_calls_by_modules(name: str, family: str) -> None:
    model = patched(family)
    cache = DynamicCache(config=model.config)
    with warned(name):
        model(full_batch()["input_ids"], output_attentions=True, **{name: cache})
    assert cache.get_seq_length() == full_batch()["input_ids"].shape[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "bloom"])
def test_captured_generate_and_layers_with_hooks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = patched(family)
    made = model.generate(**full_batch(), **NEW, return_dict_in_generate=True)
    assert getattr(made, CACHE).get_seq_length() == made.sequences.shape[1] - 1
    assert paths(model)[CAPTURED] == 5
    linear = next(one for one in model.modules() if isinstance(one, nn.Linear))  # of the first layer
    linear.register_forward_hook(lambda *args: None)
    assert torch.equal(model.generate(**full_batch(), **NEW), made.sequences)


@native
def test_native_generate_and_layers_with_hooks() -> None:
    model = patched()
    made = model.generate(**full_batch(), **NEW, return_dict_in_generate=True)
    assert getattr(made, CACHE).get_seq_length() == made.sequences.shape[1] - 1
    assert paths(model)[NATIVE] == 5
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert torch.equal(model.generate(**full_batch(), **NEW), made.sequences)
    assert paths(model)[f"{NATIVE}, but modules in layers [0]: a hook inside"] == 5


@native
def test_a_cache_given_by_its_place() -> None:
    model = patched()
    cache = DynamicCache(config=model.config)
    model(full_batch()["input_ids"], None, None, cache)
    model(torch.full((3, 1), 5), None, None, cache)
    assert paths(model)[NATIVE] == 1


@only_one
@pytest.mark.parametrize("put", [lambda monkeypatch: None, as_on_a_gpu], ids=["cpu", "as-on-a-gpu"])
def test_both_names_are_transformers_to_judge(put: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch)
    model = patched()
    used, ignored = (DynamicCache(config=model.config) for _ in range(2))
    with pytest.warns(FutureWarning, match="Both"):
        model(full_batch()["input_ids"], **{CACHE: used, FORMER: ignored})
    assert (used.get_seq_length(), ignored.get_seq_length()) == (full_batch()["input_ids"].shape[1], 0)


def _former(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    for ids in (full_batch()["input_ids"], torch.full((3, 1), 5), torch.full((3, 1), 6)):
        model(ids, **{FORMER: cache})


def _inner(model: Any) -> None:
    model.base_model(full_batch()["input_ids"], **{FORMER: DynamicCache(config=model.config)})


def _generate(model: Any) -> None:
    model.generate(**full_batch(), **NEW, **{FORMER: DynamicCache(config=model.config)})


def _both(model: Any) -> None:
    model(full_batch()["input_ids"], **{FORMER: DynamicCache(config=model.config), CACHE: None})


def _none(model: Any) -> None:
    model(full_batch()["input_ids"], **{FORMER: None})


@only_one
@pytest.mark.parametrize("put", [lambda monkeypatch: None, as_on_a_gpu], ids=["cpu", "as-on-a-gpu"])
@pytest.mark.parametrize("call", [_former, _inner, _generate, _both, _none], ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_warnings_are_transformers_own(
    family: str, call: Callable[[Any], None], put: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch)

    def said(model: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call(model)
        return [str(one.message).split("(")[0] for one in found if FORMER in str(one.message)]  # but a cache's address

    due = said(CAUSAL[family].make())
    assert due
    assert said(patched(family)) == due


def test_a_cache_of_linear_attention_alone() -> None:
    """It counts no tokens."""
    config = MambaConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2, state_size=8)
    plain = MambaForCausalLM(config).eval()
    due = plain.generate(**full_batch(), **NEW)
    model: Any = accelpatch.patch(plain, "exact", verify=False)
    assert torch.equal(model.generate(**full_batch(), **NEW), due)


def test_bytes_of_a_cache() -> None:
    assert cached_bytes(patched()) == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, float32
