"""Fused layers: what is read of a model, what is not and why, weights laid together and given back bit for bit.

As in test_step.py the CPU is put into the table of graphs; products and attention run as torch operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import KernelError
from accelpatch.fusion import fused_layer
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels.cpu import native_library
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.recipe.recipe import load, parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.fused_forward import FORWARD
from accelpatch.runtime.graphs.model_graphs import MODULES
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.spread import spread
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, full_batch, padded_batch

NAMES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
ROWS = "extends: {}\nrules:\n  - name: linear\n    replace: {}\n    options: {}\n"
RECIPES: dict[str, Any] = {
    "exact": "exact",
    "int8": parse(ROWS.format("int8", "int8_weight_only", "{group_size: null}")),
    "int4": parse(ROWS.format("int4", "int4_weight_only", "{group_size: 32, symmetric: false}")),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, int8 weights stay canonical and 4-bit ones lie in tiles."""

    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)


def patched(name: str = "llama", recipe: str = "exact", **changes: Any) -> Any:
    return accelpatch.patch(CAUSAL[name].make(**changes), RECIPES[recipe], verify=False)


def apart(name: str, recipe: str) -> Any:
    """As `patched`, with the weights as the modules had them: without graphs no fused layers are made."""
    found = load(RECIPES[recipe])
    found = replace(found, runtime=replace(found.runtime, graph="off"))
    return accelpatch.patch(CAUSAL[name].make(), found, verify=False)


def paths(model: Any) -> dict[str, int]:
    return dict(model.accelpatch.report().paths)


def assert_tokens_of_the_stock_loop(model: Any, batch: dict[str, Tensor]) -> None:
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    assert torch.equal(model.generate(**batch, **OPTIONS), plain.generate(**batch, **OPTIONS))


@spread("name, recipe", NAMES, [*RECIPES])
def test_tokens_and_the_way_back(name: str, recipe: str) -> None:
    model = patched(name, recipe)
    original = {key: value.clone() for key, value in CAUSAL[name].make().state_dict().items()}
    held = {key: value.clone() for key, value in model.state_dict().items()}
    for batch in (full_batch(), padded_batch()):
        assert_tokens_of_the_stock_loop(model, batch)
    assert paths(model) == {CAPTURED: 22, FUSED: 22, FUSED_PROMPT: 2}
    assert_same(model.state_dict(), held)
    accelpatch.unpatch(model)
    assert_same(model.state_dict(), original)


def assert_same(mine: dict[str, Tensor], due: dict[str, Tensor]) -> None:
    assert mine.keys() == due.keys()
    assert [key for key, value in due.items() if not torch.equal(mine[key], value)] == []


def storages(model: Any) -> list[list[int]]:
    """Where q, k, v and gate, up of each layer lie."""
    found = []
    for layer in model.model.layers:
        described = LayerDescription(layer)
        for group in (described.qkv, described.inner):
            weights = [m.layout.w if hasattr(m, "layout") else m.weight for m in group]
            found.append([weight.untyped_storage().data_ptr() for weight in weights])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_laid_together_once(recipe: str) -> None:
    model = apart("qwen2", recipe)
    assert all(len(set(group)) == len(group) for group in storages(model))
    first = fused_model(model)
    before = storages(model)
    assert all(len(set(group)) == 1 for group in before)
    second = fused_model(model)
    assert storages(model) == before
    for one, other in zip(first.layers, second.layers, strict=True):
        for mine, its in ((one.qkv, other.qkv), (one.gate_up, other.gate_up)):
            tensors = [part.weight.w for part in (mine, its)]
            assert tensors[0].data_ptr() == tensors[1].data_ptr()
            assert torch.equal(*tensors)
            assert mine.bias is None or (its.bias is not None and mine.bias.data_ptr() == its.bias.data_ptr())


def test_layers_share_what_their_attention_works_in() -> None:
    models = [fused_model(patched("qwen2", "exact")) for _ in range(2)]
    memories = [{id(layer.attention.memory) for layer in model.layers} for model in models]
    assert all(len(one) == 1 for one in memories)
    assert not memories[0] & memories[1]  # a model's own: two models may run at once


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_loaded_later_are_those_of_the_next_call(recipe: str) -> None:
    model, other = patched("llama", recipe), patched("llama", recipe)
    with torch.no_grad():
        for module in other.modules():
            if isinstance(module, PackedWeight) and module.is_packed:
                module.layout.w.copy_(module.layout.w.flip(0))
        if recipe == "exact":
            for parameter in other.model.layers.parameters():
                parameter.mul_(torch.linspace(-1, 1, parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1)))
    model.generate(**full_batch(), **OPTIONS)
    model.load_state_dict(other.state_dict())
    due = other.generate(**full_batch(), **OPTIONS)
    assert torch.equal(model.generate(**full_batch(), **OPTIONS), due)
    assert_tokens_of_the_stock_loop(model, full_batch())


def test_a_copy_lays_its_own_together() -> None:
    model = patched()
    model.generate(**full_batch(), **OPTIONS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(-1)
    assert_tokens_of_the_stock_loop(other, full_batch())
    assert_tokens_of_the_stock_loop(model, full_batch())
    assert FUSED in paths(model)


def test_a_hook_inside_runs_the_stock_loop() -> None:
    model, seen = patched(), []
    model.generate(**full_batch(), **OPTIONS)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *given: seen.append(1))
    model.generate(**full_batch(), **OPTIONS)
    assert len(seen) == 12
    handle.remove()
    model.generate(**full_batch(), **OPTIONS)
    assert len(seen) == 12
    but = "but modules in layers [1]: a hook inside"
    watched = {"stock loop: a hook on an inner module": 1, f"{FORWARD}, {but}": 1, f"{FUSED}, {but}": 11}
    assert paths(model) == {CAPTURED: 33, FUSED: 22, FUSED_PROMPT: 2} | watched


def _other_norm(model: Any) -> None:
    model.model.norm = nn.RMSNorm(64)


def _other_product(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Sequential(model.model.layers[1].self_attn.q_proj)
    model.model.layers[1].self_attn.q_proj.bias = None


def _one_bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.ones(32))


def _more_than_a_head(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.repeat(2)


def _both_ways(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


def _flex(model: Any) -> None:
    model.config._attn_implementation = "flex_attention"


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "norm": (_other_norm, "a norm is RMSNorm"),
    "rotary": (_more_than_a_head, "layer 0: a rotary embedding of 32 columns on heads of size 16"),
    "attention": (_flex, "layer 0: the attention implementation is flex_attention"),
}
LAYERS: dict[str, tuple[Callable[[Any], None], int, str]] = {
    "product": (_other_product, 1, "a linear layer is Sequential"),
    "one bias": (_one_bias, 0, "of q, k and v, or gate and up, only some have a bias"),
    "causal": (_both_ways, 1, "its attention is not causal"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_reasons(change: str) -> None:
    apply, reason = CHANGES[change]
    model = patched()
    apply(model)
    with pytest.raises(CannotFuse, match=reason), torch.no_grad():
        fused_model(model)


@pytest.mark.parametrize("change", LAYERS)
def test_reasons_of_one_layer(change: str) -> None:
    apply, place, reason = LAYERS[change]
    model = patched()
    apply(model)
    with torch.no_grad():
        fused = fused_model(model)
    assert fused.unfused == {place: reason}
    assert fused.places == {1 - place}


@pytest.mark.each_value
@spread("name, recipe, place", NAMES, [*RECIPES], [0, 1])
def test_a_layer_that_is_not_fused_runs_in_the_same_step(name: str, recipe: str, place: int) -> None:
    model: Any = CAUSAL[name].make()
    attention = model.model.layers[place].self_attn
    attention.__class__ = type("OwnAttention", (type(attention),), {})
    accelpatch.patch(model, RECIPES[recipe], verify=False)
    for batch in (full_batch(), padded_batch()):
        assert_tokens_of_the_stock_loop(model, batch)
    mixed = f"{FUSED}, but modules in layers [{place}]: its attention is OwnAttention"
    assert paths(model) == {CAPTURED: 22, mixed: 22, FUSED_PROMPT: 2}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "layer 0: its experts were not replaced"),
        ("falcon", "it has no Llama-like decoder"),
        ("bloom", "its scores get a bias by distance (ALiBi), which the attention kernels do not add"),
    ],
)
def test_other_families_run_their_modules(name: str, reason: str) -> None:
    model = patched(name)
    assert_tokens_of_the_stock_loop(model, padded_batch())
    assert paths(model) == {CAPTURED: 11, MODULES + reason: 11}


def test_a_kernel_that_cannot_be_launched_leaves_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Tensor:
        raise KernelError("no room")

    monkeypatch.setattr(fused_layer, "decode_attention_", refused)
    model = patched()
    assert_tokens_of_the_stock_loop(model, padded_batch())
    assert paths(model) == {CAPTURED: 11, MODULES + "KernelError: no room": 11}


def test_many_rows_run_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    ids = torch.arange(2, 67)[:, None].repeat(1, 3)
    assert_tokens_of_the_stock_loop(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert paths(model) == {CAPTURED: 11, MODULES + "65 rows": 11}


@spread("name, recipe", NAMES, [*RECIPES])
def test_more_rows_than_one_launch_reads(name: str, recipe: str) -> None:
    model = patched(name, recipe)
    ids = torch.randint(2, 100, (9, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[3, :4] = 0
    assert_tokens_of_the_stock_loop(model, {"input_ids": ids, "attention_mask": mask})
    assert paths(model) == {CAPTURED: 11, FUSED: 11, FUSED_PROMPT: 1}
