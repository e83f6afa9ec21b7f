"""Adapters in captured steps: fused layers, swaps at run time, and what runs the modules instead.

As in tests/fusion/test_fused_layer.py a CPU stands for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers.integrations import peft as peft_of_transformers

import accelpatch
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.model_graphs import STATES
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.lora import RECIPES, adapted, both_orders, config
from tests.support.steps import inner, logits, stock
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, full_batch, padded_batch

FUSING = ("llama", "qwen2", "phi3", "gemma2", "gemma3")
STEPS = 12


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)


def patched(name: str = "llama", recipe: str = "exact", **changes: Any) -> Any:
    model = accelpatch.patch(CAUSAL[name].make(), RECIPES[recipe], verify=False)
    return adapted(model, **changes)


def paths(model: Any) -> dict[str, int]:
    return {key: n for key, n in inner(model).accelpatch.report().paths.items() if not key.startswith("token chosen")}


def runtime(model: Any) -> Any:
    return vars(inner(model))[RUNTIME]


def assert_like_the_modules(model: Any, batch: dict[str, Tensor] | None = None, new: int = STEPS) -> Tensor:
    """Every step's logits are those of transformers' own loop; gives them."""
    given = padded_batch() if batch is None else batch
    found, due = logits(model, given, new), logits(stock(model), given, new)
    error = (found - due).abs().flatten(1).amax(1) / due.abs().flatten(1).amax(1)
    assert error.max() < 1e-5, f"step {int(error.argmax())} is off by {float(error.max()):.2g}"
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FUSING)
def test_fused_layers_with_adapters(name: str, recipe: str) -> None:
    for model in both_orders(name, recipe):
        assert_like_the_modules(model, new=65 if name == "llama" else STEPS)
        assert paths(model)[FUSED] == paths(model)[CAPTURED] > 0


PLACES = ("q_proj", "k_proj v_proj", "up_proj", "gate_proj down_proj", "o_proj", "q_proj lm_head", "embed_tokens")


@pytest.mark.each_value
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("recipe", ["exact", "int4"])
def test_some_places_alone(places: str, recipe: str) -> None:
    model = patched("mistral", recipe, target_modules=places.split(), rank=3)
    assert_like_the_modules(model)
    assert paths(model)[FUSED] == STEPS - 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_swapped_at_run_time(recipe: str) -> None:
    model = patched(recipe=recipe)
    torch.manual_seed(2)
    model.add_adapter("second", config(rank=7, target_modules=["q_proj", "down_proj"]))
    found, steps = {}, {}
    for round_ in range(2):
        for names in ("default", "second", ["default", "second"], ["second"], None):
            model.base_model.set_adapter(names or "default")
            if names is None:
                with model.disable_adapter():
                    made = assert_like_the_modules(model)
            else:
                made = assert_like_the_modules(model)
            key, now = str(names), list(runtime(model).captured._steps.values())
            assert round_ == 0 or torch.equal(made, found[key])
            found[key] = made
            # the second time around nothing is captured anew
            assert round_ == 0 or all(one is other for one, other in zip(now, steps[key], strict=True))
            steps[key] = now
    assert torch.equal(found["second"], found["['second']"])
    different = [found[key] for key in ("default", "second", "['default', 'second']", "None")]
    assert all(not torch.allclose(one, other) for i, one in enumerate(different) for other in different[:i])
    assert paths(model)[FUSED] == 10 * (STEPS - 1)


def test_few_states_are_kept() -> None:
    model = patched()
    for number in range(STATES + 3):
        model.add_adapter(f"a{number}", config(rank=2))
    for number in range(STATES + 3):
        model.set_adapter(f"a{number}")
        model.generate(**full_batch(), max_new_tokens=3)
    assert len(runtime(model)._states._others) == STATES


def test_weights_of_an_adapter_that_change_are_seen() -> None:
    model = patched()
    first = assert_like_the_modules(model)
    with torch.no_grad():
        inner(model).model.layers[0].self_attn.q_proj.lora_B["default"].weight.mul_(-2)
    second = assert_like_the_modules(model)
    assert not torch.allclose(first, second)
    inner(model).model.layers[0].self_attn.q_proj.set_scale("default", 3)
    assert not torch.allclose(assert_like_the_modules(model), second)


def test_merged_and_unmerged_floats() -> None:
    model = patched()
    before = assert_like_the_modules(model)
    model.merge_adapter()
    torch.testing.assert_close(assert_like_the_modules(model), before, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    torch.testing.assert_close(assert_like_the_modules(model), before, rtol=1e-3, atol=1e-3)
    assert paths(model)[FUSED] == 3 * (STEPS - 1)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_what_is_merged_into_integers_is_in_the_next_step(recipe: str) -> None:
    model = patched(recipe=recipe)
    before = assert_like_the_modules(model)
    model.merge_adapter()
    merged = assert_like_the_modules(model)
    with model.disable_adapter():
        without = assert_like_the_modules(model)
    difference = [float((one - before).norm() / before.norm()) for one in (merged, without)]
    assert difference[0] < 0.5 * difference[1], difference
    assert paths(model)[FUSED] > 0


def test_rows_do_not_know_of_each_other() -> None:
    model = patched()
    batch = full_batch()
    together = logits(model, batch, STEPS)
    # of one row the tests' continuation is that of row 0
    alone = logits(model, {key: value[:1] for key, value in batch.items()}, STEPS)
    torch.testing.assert_close(together[:, :1], alone, rtol=1e-5, atol=1e-5)


def _dora(model: Any) -> None:
    model.add_adapter("other", config(use_dora=True))
    model.set_adapter("other")


def _biased(model: Any) -> None:
    model.add_adapter("other", config(lora_bias=True))
    model.set_adapter("other")


def _dropping(model: Any) -> None:
    model.add_adapter("other", config(lora_dropout=0.0))
    model.set_adapter("other")
    dropout = torch.nn.Dropout(0.5)
    inner(model).model.layers[1].mlp.down_proj.lora_dropout["other"] = dropout.train()


UNFIT: dict[str, tuple[Callable[[Any], None], str]] = {
    "dora": (_dora, "the adapter other is not plain LoRA"),
    "bias": (_biased, "the adapter other has a bias"),
    "dropout": (_dropping, "the adapter other has dropout"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_other_adapters_run_the_modules(case: str) -> None:
    change, reason = UNFIT[case]
    model = patched()
    assert_like_the_modules(model)
    change(model)
    model.generate(**full_batch(), max_new_tokens=5)
    assert any("modules in" in key and reason in key for key in paths(model))
    if case != "dropout":
        assert_like_the_modules(model)
    model.set_adapter("default")
    assert_like_the_modules(model)


def test_weights_that_are_laid_together_later_leave_no_old_graph() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    model = adapted(model, use_dora=True)
    assert_like_the_modules(model)  # captured over modules: nothing was laid together
    with model.disable_adapter():
        assert_like_the_modules(model)
    assert runtime(model)._states._others == {}
    assert_like_the_modules(model)


def test_a_batch_with_several_adapters_runs_the_stock_loop() -> None:
    model = patched()
    model.add_adapter("second", config(rank=2))
    names = ["default", "second", "__base__"]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "adapter_names": names}
    found = model.generate(**full_batch(), **options)
    assert torch.equal(found, stock(model).generate(**full_batch(), **options))
    assert paths(model) == {"stock loop: a hook on an inner module": 1}


@pytest.mark.skipif(
    Version(version("peft")) < Version(getattr(peft_of_transformers, "MIN_PEFT_VERSION", "0")),
    reason="transformers' own methods ask for a newer PEFT",
)
def test_adapters_by_transformers_own_methods() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), RECIPES["int4"], verify=False)
    alone = assert_like_the_modules(model)
    torch.manual_seed(3)
    model.add_adapter(config(), "one")
    with_one = assert_like_the_modules(model)
    assert not torch.allclose(with_one, alone)
    model.disable_adapters()
    assert torch.equal(assert_like_the_modules(model), alone)
    model.enable_adapters()
    assert torch.equal(assert_like_the_modules(model), with_one)
    model.delete_adapter("one")
    assert torch.equal(assert_like_the_modules(model), alone)
    assert paths(model)[FUSED] == 5 * (STEPS - 1)
    accelpatch.unpatch(model)


def test_an_adapted_model_is_patched_at_its_first_use() -> None:
    model = adapted(CAUSAL["llama"].make())
    with accelpatch.patch_on_first_use("exact", verify=False):
        found = model.generate(**full_batch(), max_new_tokens=6, do_sample=False)
    assert paths(model) == {CAPTURED: 5, FUSED: 5, FUSED_PROMPT: 1}
    assert torch.equal(found, stock(model).generate(**full_batch(), max_new_tokens=6, do_sample=False))


def test_an_adapter_elsewhere_is_not_fused() -> None:
    model = patched()
    inner(model).model.layers[1].self_attn.o_proj.lora_B["default"].to("meta")
    with torch.no_grad():
        assert fused_model(inner(model)).unfused == {1: "an adapter lies on another device than cpu"}
