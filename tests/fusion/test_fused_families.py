"""Fused layers of Phi-3, Gemma 2 and Gemma 3: every step's logits against the modules, where their forms differ.

As in test_fused_layer.py a CPU stands for the GPU, in float32, so that a term left out cannot hide behind roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.fusion import fused_weights, rotary
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels.cpu import native_library
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.step import CAPTURED
from tests.fusion.test_fused_layer import apart
from tests.support.spread import spread
from tests.support.steps import assert_like_the_stock_loop
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, full_batch, padded_batch

ROWS = "extends: {}\nrules:\n  - name: linear\n    replace: {}\n    options: {}\n"
RECIPES: dict[str, Any] = {
    "exact": "exact",
    "int8": parse(ROWS.format("int8", "int8_weight_only", "{group_size: null}")),
    "int4": parse(ROWS.format("int4", "int4_weight_only", "{group_size: 32, symmetric: false}")),
}
_EAGER = {"attn_implementation": "eager"}  # the default where sdpa takes no caps
_PARTIAL = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
# name -> family, and what makes its own terms large enough to be seen
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": _PARTIAL}),
    "phi3-window": ("phi3", {"sliding_window": 6}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 7}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0} | _EAGER),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-gelu": ("gemma2", {"hidden_activation": "gelu"}),
    "gemma2-silu": ("gemma2", {"hidden_activation": "silu"}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 7}),
    "gemma3-logit-cap": ("gemma3", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "ministral": ("ministral", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "helium": ("helium", {}),
    "ernie4_5": ("ernie4_5", {}),
    "olmo2": ("olmo2", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "stablelm": ("stablelm", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
    "opt": ("opt", {"word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)


def patched(form: str, recipe: str = "exact") -> Any:
    name, changes = FORMS[form]
    return accelpatch.patch(CAUSAL[name].make(**changes), RECIPES[recipe], verify=False)


def of_length(length: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: full_batch(length)


@pytest.mark.each_value
@spread("form, recipe", [*FORMS], [*RECIPES])
def test_logits_of_64_steps_with_padding(form: str, recipe: str) -> None:
    model = patched(form, recipe)
    assert_like_the_stock_loop(model, padded_batch())
    assert model.accelpatch.report().paths[FUSED] == 64


@pytest.mark.parametrize("length", [1, 4, 5, 6])
@pytest.mark.parametrize("form", ["phi3-window", "gemma2", "gemma3"])
def test_prompts_at_the_edge_of_the_window(form: str, length: int) -> None:
    model = patched(form)
    assert_like_the_stock_loop(model, full_batch(length), 12)
    assert model.accelpatch.report().paths[FUSED] == 11


_LONGROPE = {
    "rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 16, "factor": 8.0,
}  # fmt: skip


@pytest.mark.skipif(not rotary.IN_PLACE, reason="transformers before 5.23 replaces the frequencies")
@pytest.mark.parametrize(("length", "new", "captured"), [(9, 8, True), (9, 9, False), (16, 5, False), (17, 12, True)])
def test_longrope_is_captured_on_either_side_of_its_turn(length: int, new: int, captured: bool) -> None:
    model = CAUSAL["phi3"].make(rope_parameters=_LONGROPE, original_max_position_embeddings=16)
    accelpatch.patch(model, "exact", verify=False)
    paths = model.accelpatch.report().paths
    for _ in range(2):
        assert_like_the_stock_loop(model, full_batch(length), new)
        steps = list(vars(model)[RUNTIME].captured._steps.values())
    if not captured:
        assert paths["stock loop: longrope's frequencies change beyond 16 tokens"] == 2
        return
    assert paths[FUSED] == paths[CAPTURED] == 2 * (new - 1)
    assert paths["prefill by modules: rotary frequencies that change with the length"] == 2
    if length < 16:  # beyond, transformers before 5.23 puts another buffer into the model
        model.generate(**full_batch(length), max_new_tokens=new)
        assert all(
            one is other for one, other in zip(vars(model)[RUNTIME].captured._steps.values(), steps, strict=True)
        )


OUTSIDE = ("logits", "embedding", "divisor", "positions")  # of the layers
MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "caps": ("gemma2-caps", lambda fused: setattr_(fused.layers[0].attention, softcap=0.0)),
    "logits": ("gemma3-logit-cap", lambda fused: setattr_(fused, softcap=0.0)),
    "plus-one": ("gemma3", lambda fused: setattr_(fused.layers[1].attention, plus_one=False)),
    "after": ("gemma2", lambda fused: setattr_(fused.layers[1], after_mlp=None)),
    "tables": ("gemma3", lambda fused: swapped(fused.layers)),
    "window": ("gemma2", lambda fused: setattr_(fused.layers[0].attention, window=6)),
    "multiplier": ("granite", lambda fused: setattr_(fused.layers[0], multiplier=0.4)),
    "interleaved": ("glm4", lambda fused: setattr_(fused.layers[0].prepare, inv_freq=None)),
    "all heads": ("olmo2", lambda fused: setattr_(fused.layers[1].prepare, q_norm=None, k_norm=None)),
    "no rotary": ("smollm3", lambda fused: swapped(fused.layers)),
    "embedding": ("granite", lambda fused: setattr_(fused, embedding_multiplier=4.0)),
    "divisor": ("granite", lambda fused: setattr_(fused, logit_divisor=1.0)),
    "norm bias": ("stablelm", lambda fused: setattr_(fused.layers[0].attention_norm, bias=None)),
    "parallel": ("cohere", lambda fused: setattr_(fused.layers[1], parallel=False)),
    "by head": ("gpt_neox", lambda fused: setattr_(fused.layers[0], by_head=False)),
    "activation": ("phi", lambda fused: setattr_(fused.layers[0].gate_up, activation="relu")),
    "positions": ("opt", lambda fused: setattr_(fused.positions, offset=1)),
    "scaling": ("gemma2", lambda fused: setattr_(fused.layers[0].attention, scaling=0.25)),
}


def setattr_(frozen: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def swapped(layers: Any) -> None:
    one, other = (layer.attention.inv_freq for layer in layers)
    setattr_(layers[0].attention, inv_freq=other)
    setattr_(layers[1].attention, inv_freq=one)


def planted(mutation: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have fused layers read wrong, as `mutation` says; returns the form in which that shows."""
    form, change = MUTATIONS[mutation]

    def changed(model: Any, unfused: Any) -> Any:
        fused = fused_model(model, unfused)
        change(fused)
        return fused

    monkeypatch.setattr("accelpatch.runtime.graphs.model_graphs.fused_model", changed)
    return form


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_term_left_out_is_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = planted(mutation, monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        assert_like_the_stock_loop(patched(form), padded_batch(), 12)


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name not in OUTSIDE])
def test_a_term_left_out_is_found_by_the_patch(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = FORMS[planted(mutation, monkeypatch)]
    model: Any = accelpatch.patch(CAUSAL[name].make(**changes), "exact")
    layers = [site for site in model.accelpatch.report().sites if site.role == "layer"]
    wrong = [site for site in layers if site.failed]
    assert wrong
    assert all("units of its dtype's precision from its modules" in site.by_modules for site in wrong)
    assert not any(site.fused for site in wrong)
    assert f"{len(layers) - len(wrong)} of {len(layers)} layers fused" in str(model.accelpatch.report())
    assert_like_the_stock_loop(model, padded_batch(), 12)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("form", ["llama", "phi3"])
def test_a_gate_and_its_up_lie_paired_once(form: str) -> None:
    model, plain = apart(form, "int4"), apart(form, "int4")
    with torch.no_grad():
        fused = fused_model(model)
    for layer, before in zip(model.model.layers, plain.model.layers, strict=True):
        halves, others = LayerDescription(layer).inner, LayerDescription(before).inner
        assert [half.layout.part for half in halves] == (["gate", "up"] if len(halves) == 2 else ["both"])
        assert len({half.layout.w.data_ptr() for half in halves}) == 1
        assert halves[0].layout.w.numel() == sum(other.layout.w.numel() for other in others)
        x = torch.randn(3, 64)
        for half, other in zip(halves, others, strict=True):
            assert all(same(*pair) for pair in zip(half.canonical(), other.canonical(), strict=True))
            torch.testing.assert_close(half(x), other(x))
        torch.testing.assert_close(layer.mlp(x), before.mlp(x))
    assert all(layer.gate_up.weight.part == "both" for layer in fused.layers)  # type: ignore[union-attr]


def test_halves_that_were_paired_come_apart() -> None:
    model, plain = patched("llama", "int4"), apart("llama", "int4")
    with torch.no_grad():
        fused_model(model)
    mlp, before = model.model.layers[0].mlp, plain.model.layers[0].mlp
    first = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    mlp.gate_proj.load_state_dict(before.up_proj.state_dict())
    assert mlp.gate_proj.layout.part == "all"
    assert torch.equal(mlp.up_proj.state_dict()["q"], before.up_proj.state_dict()["q"])
    assert_like_the_stock_loop(model, padded_batch(), 12)
    assert mlp.gate_proj.layout.w is mlp.up_proj.layout.w
    mlp.load_state_dict(first)
    assert_like_the_stock_loop(model, padded_batch(), 12)
    fused_weights.concatenated_linear((mlp.gate_proj, mlp.up_proj), torch.float32)
    assert mlp.up_proj.layout.part == "all"
    assert all(torch.equal(tensor, first[name]) for name, tensor in mlp.state_dict().items())
