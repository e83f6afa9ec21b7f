"""Fused layers with experts: what runs, the tokens of the stock loop, reasons, and the way back.

As in test_fused_layer.py the CPU is put into the table of graphs; kernels run as torch operations.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.fusion import read_layers, sparse_layer
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.read_layers import fused_model
from accelpatch.fusion.sparse_layer import FusedSparseLayer
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.triton import launch
from accelpatch.modules.quantized_experts import QuantizedExperts
from accelpatch.recipe.recipe import parse
from accelpatch.replacers.experts import FloatExpertsReplacer
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, EXPERTS, full_batch, padded_batch, snapshot

NAMES = ("mixtral", "qwen3_moe", "olmoe")
LENGTH = 64
MXFP4 = "extends: int8\nrules:\n  - name: experts\n    replace: mxfp4_experts\n    options: {}\n"
FORMS = {
    "exact": "extends: exact",
    "int8": "extends: int8\nrules:\n  - name: linear\n    options: {group_size: null}\n",
    "int4": "extends: int4\nrules:\n  - name: linear\n    options: {group_size: 32}\n",
    "mxfp4": MXFP4 + "verify:\n  bound: 0.3\n",
}
#: gpt-oss's floats are transposed, and stay; MXFP4 is its own format, and as good as the others' int4
EACH = (
    *itertools.product(NAMES, ("exact", "int8", "int4")),
    *itertools.product(("gpt_oss",), ("int8", "int4", "mxfp4")),
)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, 4-bit weights lie in tiles, and experts of floats are replaced too."""

    def propose(self: Any, site: Any, options: Any, device: Any) -> Any:
        return original(self, site, options, KNOWN["sm_90"])

    original = FloatExpertsReplacer.propose
    monkeypatch.setattr(FloatExpertsReplacer, "propose", propose)
    monkeypatch.setattr(launch, "_installed", lambda: True)
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)


def patched(name: str, form: str, verify: bool = False) -> Any:
    return accelpatch.patch(EXPERTS[name].make(), parse(FORMS[form]), verify=verify)


def stock(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the stock loop makes of the replaced modules."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    made: Tensor = plain.generate(**batch, max_new_tokens=LENGTH, do_sample=False)
    return made


@pytest.mark.each_value
@pytest.mark.parametrize("name, form", EACH)
def test_64_steps_and_the_way_back(name: str, form: str) -> None:
    before = snapshot(EXPERTS[name].make())
    model = patched(name, form)
    for batch in (full_batch(), padded_batch()):
        assert torch.equal(model.generate(**batch, max_new_tokens=LENGTH, do_sample=False), stock(model, batch))
    paths = dict(model.accelpatch.report().paths)
    assert paths == {CAPTURED: 2 * (LENGTH - 1), FUSED: 2 * (LENGTH - 1), FUSED_PROMPT: 2}
    accelpatch.unpatch(model)
    after = snapshot(model)
    assert {key: value for key, value in before.items() if key == "state_dict"} == {"state_dict": after["state_dict"]}


@pytest.mark.parametrize("name, form", EACH)
def test_every_layer_is_verified_and_stays_fused(name: str, form: str) -> None:
    model = patched(name, form, verify=True)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    made = fused_model(model)
    assert made.unfused == {}
    assert isinstance(made.layers[0], FusedSparseLayer)
    assert [type(layer) is FusedSparseLayer for layer in made.layers] == [True, name != "qwen3_moe"]


@pytest.mark.parametrize("name", [*NAMES, "gpt_oss"])
def test_norm_and_choice_go_to_the_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the HIP kernels run: the same tokens, and the same way for many rows; the layer's check holds."""
    monkeypatch.setattr(QuantizedExperts, "why_not_routed", lambda self, chosen, dtype: None)
    model = patched(name, "int4", verify=True)
    made = fused_model(model)
    assert made.unfused == {}
    assert made.layers[0].sparse.routed
    key = ("routed_experts", "operations")
    for batch in (full_batch(), padded_batch()):
        ran = dispatch.calls[key]
        assert torch.equal(model.generate(**batch, max_new_tokens=LENGTH, do_sample=False), stock(model, batch))
        sparse = sum(isinstance(layer, FusedSparseLayer) for layer in made.layers)
        assert dispatch.calls[key] >= ran + (LENGTH - 1) * sparse


def test_a_norm_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault in what goes to the experts."""
    stock_way = QuantizedExperts.compute_routed

    def wrong(self: Any, x: Tensor, norm: tuple[Tensor, float, bool], *rest: Any) -> Tensor:
        return stock_way(self, x, (torch.ones_like(norm[0]) * 2, *norm[1:]), *rest)

    monkeypatch.setattr(QuantizedExperts, "why_not_routed", lambda self, chosen, dtype: None)
    monkeypatch.setattr(QuantizedExperts, "compute_routed", wrong)
    model = patched("mixtral", "int4", verify=True)
    assert len(model.accelpatch.report().verification.failures) == 2


def _bias(mlp: Any) -> None:
    mlp.gate.register_parameter("bias", nn.Parameter(torch.zeros(4)))


def _float_router(mlp: Any) -> None:
    mlp.gate.double()


def _other_experts(mlp: Any) -> None:
    mlp.experts = copy.deepcopy(CAUSAL["mixtral"].make().model.layers[0].mlp.experts)


REASONS = {
    "a router with a bias": (_bias, "its router is MixtralTopKRouter"),
    "a router of another dtype": (_float_router, "its router is torch.float64, or is not contiguous"),
    "other experts": (_other_experts, "its experts were not replaced"),
}


@pytest.mark.parametrize("change", [*REASONS])
def test_reasons_of_one_layer(change: str) -> None:
    model = patched("mixtral", "int8")
    act, reason = REASONS[change]
    act(model.model.layers[1].mlp)
    assert fused_model(model).unfused == {1: reason}


def test_a_block_with_a_forward_of_its_own_is_not_fused() -> None:
    class Other(nn.Module):
        pass

    model = patched("mixtral", "int8")
    model.model.layers[0].mlp = Other()
    assert LayerDescription(model.model.layers[0]).changed() is not None
    with pytest.raises(CannotFuse):
        fused_model(model, {1: "another reason"})


def test_an_expert_that_a_layer_chooses_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: weights that are not divided by their sum."""

    def wrong(layer: Any, dtype: torch.dtype) -> Any:
        return replace(sparse_layer.sparse_mlp(layer, dtype), normalise=False)

    monkeypatch.setattr(read_layers, "sparse_mlp", wrong)
    model = patched("mixtral", "int8", verify=True)
    assert len(model.accelpatch.report().verification.failures) == 2


def _without(**changes: Any) -> Any:
    """`attention_shape` with a planted fault."""

    def wrong(*given: Any) -> Any:
        return replace(stock_way(*given), **changes)

    stock_way = read_layers.attention_shape
    return wrong


@pytest.mark.parametrize(
    "changes", [{"sinks": None}, {"window": 0}, {"rope_scaling": 1.0}], ids=["sinks", "window", "yarn"]
)
def test_each_term_of_gpt_oss_attention_counts(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_layers, "attention_shape", _without(**changes))
    model = patched("gpt_oss", "int8", verify=True)
    assert len(model.accelpatch.report().verification.failures) == (1 if "window" in changes else 2)


def test_sinks_of_another_number_of_heads() -> None:
    model = patched("gpt_oss", "int8")
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(3))
    assert fused_model(model).unfused == {1: "its sinks are [3] for 4 heads"}
