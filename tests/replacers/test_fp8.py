"""fp8_weight_only: planned for each device, patched, moved between dtypes, undone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.device import KNOWN, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.modules.quantized_linear import Fp8WeightOnlyLinear
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.recipe.recipe import parse
from accelpatch.replacers import registry
from tests.support.tiny import CAUSAL

RECIPE = parse(
    "name: fp8\ndescription: eight bits\nverify: {bound: 0.1}\n"
    "rules: [{match: {role: linear}, replace: fp8_weight_only}]\n"
)


def site(module: nn.Module) -> Site:
    return Site("at", module, "q_proj", ("Linear",), 48, 256, 48 * 256 * 2, 48 * 256 * 2, "bfloat16")


@pytest.mark.parametrize("arch, fnuz", [("sm_90", False), ("gfx90a", False), ("gfx942", True), ("gfx950", False)])
def test_planned_by_the_kernels_of_a_gpu(arch: str, fnuz: bool) -> None:
    choice = registry()["fp8_weight_only"].propose(
        site(nn.Linear(256, 48, False, dtype=torch.bfloat16)), {}, KNOWN[arch]
    )
    assert isinstance(choice, Choice)
    assert (choice.kernel, choice.note, choice.detail["fnuz"]) == ("hip", "", fnuz)
    assert choice.resident_after == 48 * 256 + 48 * 4


def test_a_table_has_no_such_form() -> None:
    answer = registry()["fp8_weight_only"].propose(
        site(nn.Embedding(48, 256, dtype=torch.bfloat16)), {}, KNOWN["sm_90"]
    )
    assert isinstance(answer, Reason)
    assert "int8_weight_only" in answer.text


def test_patched_moved_and_undone() -> None:
    model = CAUSAL["llama"].make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kernel = "torch" if native_library.why_not(probe("cpu")) else "cpu_stored"
    ran = dispatch.calls["fp8_linear", kernel]
    accelpatch.patch(model, RECIPE)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert [site.kernel for site in report.sites if site.replacer == "fp8_weight_only"] == [kernel] * 14
    assert dispatch.calls["fp8_linear", kernel] > ran
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, Fp8WeightOnlyLinear)
    held = copy.deepcopy(layer.canonical())
    model.half()
    assert layer.layout.w.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.layout.w.float(), held.w.float())
    assert torch.equal(layer.layout.scale, held.scale)
    model.float()
    accelpatch.unpatch(model)
    state = model.state_dict()
    assert all(torch.equal(state[key], value.half().float()) for key, value in before.items())  # as without the patch
