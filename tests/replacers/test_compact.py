"""Weights in 12 bits through patch() and back, planned for a GPU and run by torch's operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.errors import PatchError
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels import dispatch
from accelpatch.modules.compact_linear import CompactLinear
from accelpatch.patching import apply
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import CAUSAL, full_batch, padded_batch

GPU = KNOWN["sm_90"]
NAMES = ("llama", "qwen2", "phi3", "gemma3")
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]


def model_of(name: str = "llama", **changes: Any) -> Any:
    return CAUSAL[name].make(torch.bfloat16, **changes)


def patched(model: Any, **options: Any) -> Any:
    return accelpatch.patch(model, "compact", device=GPU, **options)


def compact(model: nn.Module) -> dict[str, CompactLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, CompactLinear)}


def bits(state: dict[str, Any]) -> dict[str, list[int]]:
    return {name: value.contiguous().view(torch.int16).flatten().tolist() for name, value in state.items()}


@pytest.mark.parametrize("keep", ["cpu", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_the_way_there_and_back(name: str, keep: str) -> None:
    model = model_of(name)
    modules, before = dict(model.named_modules()), bits(model.state_dict())
    patched(model, keep_original=keep)
    held = compact(model)
    assert len(held) > 5
    assert all(module.tiles is not None for module in held.values())
    assert bits(model.state_dict()) == before, "names and values are the original's"
    assert all(modules[path].weight.numel() == 0 for path in held), "the weight is held once"
    ran = dispatch.calls["compact_linear", "torch"]
    for batch in (full_batch(), padded_batch()):
        model.generate(**batch, **OPTIONS)
    assert dispatch.calls["compact_linear", "torch"] > ran
    assert model.accelpatch.report().paths[CAPTURED] == model.accelpatch.report().paths[FUSED] == 22
    accelpatch.unpatch(model)
    assert dict(model.named_modules()) == modules
    assert bits(model.state_dict()) == before


def test_the_tokens_are_those_of_exact() -> None:
    """On a CPU both run torch's product, with the same weights."""
    batch, plain = full_batch(), accelpatch.patch(model_of(), "exact", device=GPU)
    assert torch.equal(patched(model_of()).generate(**batch, **OPTIONS), plain.generate(**batch, **OPTIONS))


def test_a_plan_counts_the_bytes_and_a_report_what_is_held() -> None:
    model = model_of()
    planned = {one.path: one for one in accelpatch.plan(model, "compact", device=GPU).report().sites}
    patched(model)
    for path, module in compact(model).items():
        site = next(one for one in model.accelpatch.report().sites if one.path == path)
        assert site.replacer == "compact"
        assert site.resident_bytes[1] >= module.weight_bytes
        assert planned[path].resident_bytes[1] == pytest.approx(site.resident_bytes[1], rel=0.2)
        assert site.format_error is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.half(), "bfloat16"),
        (lambda model: model.float(), "bfloat16"),
        (lambda model: model.tie_weights() if model.config.tie_word_embeddings else None, "tied to an embedding"),
    ],
    ids=["float16", "float32", "tied"],
)
def test_what_stays_in_16_bits(change: Callable[[Any], Any], words: str) -> None:
    model = model_of(tie_word_embeddings=words == "tied to an embedding")
    change(model)
    report = accelpatch.plan(model, "compact", device=GPU).report()
    heads = [site for site in report.sites if site.path == "lm_head" or "lm_head" in site.tied]
    assert all(site.token_bytes[1] >= site.token_bytes[0] for site in heads)
    if model.dtype != torch.float32:
        assert any(words in note for note in report.notes)


@pytest.mark.parametrize(
    "place", ["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"]
)
def test_a_weight_of_many_binades_stays_as_it_is(place: str) -> None:
    """And so do its neighbours in one product: the fused layers need one format."""
    model = model_of()
    weight = model.get_submodule(place).weight
    with torch.no_grad():
        weight[3].copy_(torch.exp2(torch.linspace(-60, 0, weight.shape[1])))
    before = bits(model.state_dict())
    patched(model)
    assert compact(model)[place].tiles is None
    report = model.accelpatch.report()
    assert any("binades" in note for note in report.notes)
    assert next(site for site in report.sites if site.path == place).token_bytes[1] == weight.nbytes
    model.generate(**full_batch(), **OPTIONS)
    assert report.paths[FUSED] == 11
    assert bits(model.state_dict()) == before
    accelpatch.unpatch(model)
    assert bits(model.state_dict()) == before


def test_a_copy_a_move_and_a_load() -> None:
    model = patched(model_of())
    before = bits(model.state_dict())
    twin = copy.deepcopy(model)
    assert bits(accelpatch.unpatch(twin).state_dict()) == before
    other = model_of()
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(2)
    model.load_state_dict(other.state_dict())
    assert bits(model.state_dict()) == bits(other.state_dict()) != before
    assert all(module.tiles is not None for module in compact(model).values())
    model.half()
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == torch.float16
    assert torch.equal(weight, other.model.layers[0].mlp.down_proj.weight.half())
    accelpatch.unpatch(model)
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.float16


def test_weights_are_laid_together_once() -> None:
    model = patched(model_of("qwen2"))
    fused = fused_model(model)
    layer, one = model.model.layers[0], fused.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    whole = one.qkv.weight.w  # type: ignore[union-attr]
    assert {part.layout.w.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}
    assert layer.mlp.gate_proj.tiles.w is layer.mlp.up_proj.tiles.w
    assert layer.mlp.gate_proj.tiles.part == "gate"


def test_a_failed_patch_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    before = bits(model.state_dict())

    def fail(*_: Any) -> None:
        raise PatchError("at the very end")

    monkeypatch.setattr("accelpatch.patching.apply._set_all", fail)
    with pytest.raises(PatchError, match="very end"):
        patched(model)
    assert not hasattr(model, "accelpatch")
    assert bits(model.state_dict()) == before


def test_an_interrupt_after_the_last_step_gives_the_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    before = bits(model.state_dict())
    release_originals = apply.release_originals

    def interrupted(*args: Any) -> None:
        release_originals(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(apply, "release_originals", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patched(model)
    assert not hasattr(model, "accelpatch")
    assert bits(model.state_dict()) == before


def test_what_else_a_layer_holds_stays_its_own() -> None:
    model = model_of("qwen2")
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_buffer("fine", torch.tensor([1.00001]))
    patched(model)
    state = {name: 2 * value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    accelpatch.unpatch(model)
    assert model.model.layers[0].self_attn.q_proj is layer
    assert layer.fine.dtype == torch.float32
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_missing_weight_is_missed() -> None:
    model = patched(model_of())
    state = model.state_dict()
    del state["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*model\.layers\.0\.mlp\.down_proj\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["model.layers.0.mlp.down_proj.weight"]


def test_in_inference_mode() -> None:
    model = model_of()
    before = bits(model.state_dict())
    with torch.inference_mode():
        patched(model)
        model.generate(**full_batch(), **OPTIONS)
        accelpatch.unpatch(model)
    assert bits(model.state_dict()) == before
    model.train()
    model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()


def test_a_pair_that_moves_is_held_once() -> None:
    model = patched(model_of())
    gate = model.model.layers[0].mlp.gate_proj
    fused_model(model)
    assert gate.tiles.part == "gate"
    assert gate.weight_bytes < gate.weight.nbytes
    model.to("meta")
    assert gate.tiles.w.shape[0] * 16 < gate.tiles.n + 16


def test_a_layer_without_rows() -> None:
    model = model_of()
    model.extra = nn.Linear(8, 0).bfloat16()
    patched(model, verify=False)
    assert accelpatch.unpatch(model).extra.weight.shape == (0, 8)
