"""Adapters in the native steps of a CPU: the modules' logits, switches at run time, and what runs the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.device import probe
from accelpatch.fusion.native_model import native_model
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.pack_adapters import PackAdapters
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.support.lora import RECIPES, adapted, both_orders, config
from tests.support.steps import inner, logits, stock
from tests.support.tiny import CAUSAL, full_batch, padded_batch

pytestmark = pytest.mark.skipif(native_library.why_not(probe("cpu")) is not None, reason="no native CPU kernels")
STEPS = 6
NAMES = ("llama", "qwen2", "gemma2", "gemma3")


def in_bfloat16(model: Any) -> Any:
    """Factors that are held beside rounded weights without being rounded themselves."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.bfloat16())
    return model


def patched(name: str = "llama", recipe: str = "exact", rank: int = 4, **changes: Any) -> Any:
    model = accelpatch.patch(CAUSAL[name].make(), RECIPES[recipe], verify=False)
    return in_bfloat16(adapted(model, rank=rank, **{"lora_alpha": rank} | changes))


def native_steps(model: Any) -> int:
    return int(inner(model).accelpatch.report().paths.get(NATIVE, 0))


def assert_like_the_modules(model: Any, batch: dict[str, Tensor] | None = None) -> Tensor:
    """Every step is native, and its logits are those of transformers' own loop over the modules; gives them."""
    given, before = padded_batch() if batch is None else batch, native_steps(model)
    found = logits(model, given, STEPS)
    assert native_steps(model) == before + STEPS - 1, inner(model).accelpatch.report().paths
    due = logits(stock(model), given, STEPS)
    error = (found - due).abs().flatten(1).amax(1) / due.abs().flatten(1).amax(1)
    assert error.max() < 3e-5, f"step {int(error.argmax())} is off by {float(error.max()):.2g}"
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_with_adapters(name: str, recipe: str) -> None:
    for model in both_orders(name, recipe, lora_alpha=4):
        with_them = assert_like_the_modules(in_bfloat16(model))
        with model.disable_adapter():
            assert not torch.allclose(assert_like_the_modules(model), with_them, rtol=1e-2, atol=1e-2)


@pytest.mark.each_value
@pytest.mark.parametrize("places", ["q_proj", "k_proj v_proj", "up_proj", "gate_proj down_proj", "o_proj lm_head"])
@pytest.mark.parametrize("rank", [1, 3, 17])
def test_some_places_and_odd_ranks(places: str, rank: int) -> None:
    assert_like_the_modules(patched("mistral", "int4", rank, target_modules=places.split()))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_do_not_know_of_each_other(rows: int) -> None:
    model = patched(recipe="int8")
    ids = torch.arange(rows * 5).view(rows, 5) + 3
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    together = assert_like_the_modules(model, given)
    alone = logits(model, {key: value[:1] for key, value in given.items()}, STEPS)
    torch.testing.assert_close(together[:, :1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    model, before = patched(recipe="int4", rank=9), torch.get_num_threads()
    due = logits(model, full_batch(), STEPS)
    try:
        torch.set_num_threads(threads)
        found = logits(model, full_batch(), STEPS)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_switched_at_run_time(recipe: str) -> None:
    model, found = patched(recipe=recipe), dict[str, Tensor]()
    torch.manual_seed(2)
    model.add_adapter("second", config(rank=8, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    in_bfloat16(model)
    for _ in range(2):
        for names in ("default", "second", ["default", "second"]):
            model.base_model.set_adapter(names)
            made = assert_like_the_modules(model)
            assert torch.equal(made, found.setdefault(str(names), made))
    assert len({float(one.double().sum()) for one in found.values()}) == len(found)
    inner(model).model.layers[0].self_attn.q_proj.set_scale("default", 2)
    assert not torch.equal(assert_like_the_modules(model), made)


@pytest.mark.parametrize("recipe", RECIPES)
def test_merged_weights_and_what_was_learnt_are_seen(recipe: str) -> None:
    model = patched(recipe=recipe)
    first = assert_like_the_modules(model)
    with torch.no_grad():
        inner(model).model.layers[0].mlp.up_proj.lora_B["default"].weight.mul_(-2)
    learnt = assert_like_the_modules(model)
    assert not torch.allclose(first, learnt)
    model.merge_adapter()
    merged = assert_like_the_modules(model)
    assert float((merged - learnt).norm() / learnt.norm()) < {"exact": 1e-4, "int8": 0.1, "int4": 0.5}[recipe]


def _dora(model: Any) -> None:
    model.add_adapter("other", config(use_dora=True))
    model.set_adapter("other")


def _dropping(model: Any) -> None:
    inner(model).model.layers[1].mlp.down_proj.lora_dropout["default"] = torch.nn.Dropout(0.5).train()


def _dropping_later(model: Any) -> None:
    _dropping(model)
    dropout = inner(model).model.layers[1].mlp.down_proj.lora_dropout["default"].eval()
    assert_like_the_modules(model)
    dropout.train()


UNFIT: dict[str, tuple[Callable[[Any], None], str]] = {
    "dora": (_dora, "the adapter other is not plain LoRA"),
    "dropout": (_dropping, "the adapter default has dropout"),
    "dropout-begins": (_dropping_later, "the adapter default has dropout"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_other_adapters_run_the_modules(case: str) -> None:
    change, reason = UNFIT[case]
    model = patched()
    assert_like_the_modules(model)
    change(model)
    model.generate(**full_batch(), max_new_tokens=4)
    assert any("modules" in path and reason in path for path in inner(model).accelpatch.report().paths)


def test_weights_stay_where_they_are_when_adapters_change() -> None:
    model = patched(recipe="int8")
    native_model(inner(model))
    layer = inner(model).model.layers[0].mlp.up_proj.base_layer
    before = layer.layout
    model.set_adapter("default")
    native_model(inner(model))
    assert layer.layout is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_adapters_as_one(dtype: torch.dtype) -> None:
    pairs = [(torch.randn(r, 24), torch.randn(19, r)) for r in (3, 5)]
    one = PackAdapters.of(pairs, dtype)
    assert one is not None
    assert PackAdapters.of([], dtype) is None
    x, y = torch.randn(4, 24), torch.randn(4, 19)
    due = y + sum((x @ a.to(dtype).float().T) @ b.to(dtype).float().T for a, b in pairs)
    torch.testing.assert_close(one.add_(y.clone(), x), due)
    assert not one.blocks[-1, :, 3:].any()
