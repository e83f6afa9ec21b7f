"""Experts whose 4-bit codes lie in tiles of the HIP kernels: when they do; all else is as it is in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.triton import launch
from accelpatch.modules import quantized_experts
from accelpatch.modules.quantized_experts import QuantizedExperts
from accelpatch.recipe.recipe import parse
from tests.support.simulated import logits
from tests.support.tiny import EXPERTS, full_batch, snapshot

ALONE = "rules:\n  - match: {role: experts}\n    replace: int4_experts\nverify: {bound: 0.3}\n"
WIDE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_on_a_gpu_4_bits_run_by_hip_where_tiles_hold_them(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    for sizes, kernel in ((WIDE, "hip"), ({}, "triton")):
        with torch.device("meta"):
            model = EXPERTS["mixtral"].make(torch.bfloat16, **sizes)
        plan = accelpatch.plan(model, "int4", device=KNOWN[arch])
        found = [entry.choice for entry in plan.replaced if entry.site.role == "experts" and entry.choice]
        assert [one.kernel for one in found] == [kernel] * 2
        assert {one.libraries for one in found} == {("experts_int4_bf16_minimum",) if kernel == "hip" else ()}
        assert all(("not by the HIP kernels: tiles hold multiples" in one.note) == (kernel != "hip") for one in found)
        layers = [site for site in plan.report().sites if site.role == "layer"]
        launches = "6 launches" if kernel == "hip" else "8 launches"
        assert all(site.fused and launches in str(site.kernel) for site in layers)


def experts_of(model: Any) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


def _tiles(up: Any, down: Any, *rest: Any) -> Any:
    parts = ("q", "scale", "offset", "bias")
    up, down = ([held[part] for part in parts] for held in (up, down))
    return Stack.of_tiles(*up, interleaved=True), Stack.of_tiles(*down, interleaved=False)


def test_experts_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the same numbers, files, copies and moves as in words, and the way back."""
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    batch = full_batch()
    words = accelpatch.patch(EXPERTS["mixtral"].make(**WIDE), parse(ALONE), verify=False)
    monkeypatch.setattr(quantized_experts, "tiles_for", _tiles)
    model = EXPERTS["mixtral"].make(**WIDE)
    before = snapshot(model)
    accelpatch.patch(model, parse(ALONE))
    assert all(one.tiled for module in experts_of(model) for one in module.layouts)
    assert not any(module.layouts[0].tiled for module in experts_of(words))
    expected = logits(words, batch)
    assert torch.equal(logits(model, batch), expected)
    assert torch.equal(logits(copy.deepcopy(model), batch), expected)
    state, due = model.state_dict(), words.state_dict()
    assert state.keys() == due.keys()
    assert all(torch.equal(one, due[key]) and one.dtype == due[key].dtype for key, one in state.items())
    model.load_state_dict(due)
    assert torch.equal(logits(model, batch), expected)
    for one, other in zip(experts_of(model), experts_of(words), strict=True):
        assert torch.equal(one.gate_up_proj, other.gate_up_proj)
        assert torch.equal(one.down_proj, other.down_proj)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert all(value.dtype == due[key].dtype for key, value in half.state_dict().items() if "proj_scale" in key)
    accelpatch.unpatch(model)
    assert snapshot(model) == before
