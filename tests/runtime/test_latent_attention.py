"""DeepSeek's attention over a compressed cache (MLA): modules inside captured steps, and the plan says why."""

from __future__ import annotations

import copy

import pytest
import torch

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import EXPERTS, Tiny, full_batch, padded_batch

REASON = "its keys and values are made of a compressed cache (MLA), which fused layers do not read"
V2 = {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "n_group": 1, "topk_group": 1}
DEEPSEEK = {
    "v3": EXPERTS["deepseek_v3"],
    "v2": Tiny("DeepseekV2", {**EXPERTS["deepseek_v3"].config, **V2}, {}),
}
NEW = 12


@pytest.mark.parametrize("name", DEEPSEEK)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_plan_says_why_its_layers_stay(name: str, arch: str) -> None:
    plan = accelpatch.plan(DEEPSEEK[name].make(torch.bfloat16), "int8", device=KNOWN[arch])
    layers = [one for one in plan.report().sites if one.role == "layer"]
    assert len(layers) == 2
    assert {one.by_modules for one in layers} == {REASON}
    assert REASON in str(plan)


@pytest.mark.parametrize("name", DEEPSEEK)
@pytest.mark.parametrize("batch", [full_batch, padded_batch], ids=["full", "padded"])
def test_steps_are_those_of_the_stock_loop(name: str, batch: object, machine: str) -> None:
    model = accelpatch.patch(DEEPSEEK[name].make(), "int8")
    assert model.accelpatch.report().verification.failures == []
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    given = batch()  # type: ignore[operator]
    found = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, plain.generate(**given, max_new_tokens=NEW, do_sample=False))
    paths = model.accelpatch.report().paths
    assert (paths[CAPTURED] > 0) == (machine == "as a gpu"), dict(paths)
