"""A user's implementation of the linear operation inside fused layers, as on a GPU: the CPU is put into the table of
graphs, as in test_fused_layer.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels.cpu import native_library
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support import plugins
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, padded_batch

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
ROLES = "[linear, head]"
RECIPE = """
extends: exact
rules:
  - name: product
    match: {role: ROLES}
    replace: gemv
    options: {kernel: mine}
verify:
  bounds: {product: 32 u}
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """(rows, N) of each call of the implementation `mine`."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)
    found: list[tuple[int, ...]] = []

    def few(spec: Any, device: Any) -> str | None:
        return None if spec.sizes["M"] <= 8 else "more than 8 rows"

    @accelpatch.implementation("linear", name="mine", why_not=few)
    def mine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((x[..., 0].numel(), w.shape[0]))
        return functional.linear(x, w, bias)

    yield found
    plugins.forget()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_it_runs_in_every_fused_layer(calls: list[tuple[int, ...]], name: str) -> None:
    model: Any = CAUSAL[name].make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    accelpatch.patch(model, parse(RECIPE.replace("ROLES", ROLES)))
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert "2 of 2 layers fused" in str(report)
    batch = padded_batch()
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    due = plain.generate(**batch, **OPTIONS)
    calls.clear()
    assert torch.equal(model.generate(**batch, **OPTIONS), due)
    assert dict(model.accelpatch.report().paths).keys() >= {CAPTURED, FUSED, FUSED_PROMPT}
    assert len(calls) >= 11 * (2 * 4 + 1), "four products a layer, and the head, a step"
    assert max(rows for rows, _ in calls) <= 8
    assert 2 * model.config.intermediate_size in {n for _, n in calls}, "gate and up are one weight"
    accelpatch.unpatch(model)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_a_layer_of_which_it_has_a_part_stays_as_its_modules(calls: list[tuple[int, ...]]) -> None:
    model: Any = CAUSAL["llama"].make()
    recipe = RECIPE.replace("name: product", "name: own").replace("ROLES", "q_proj")
    accelpatch.patch(model, parse(recipe), verify=False)
    reason = r"q, k and v, or gate and up, run by several kernels \(mine\)"
    with pytest.raises(CannotFuse, match=reason):
        fused_model(model)
    plan = accelpatch.plan(CAUSAL["llama"].make(torch.bfloat16), parse(recipe), device=KNOWN["sm_90"])
    assert "0 of 2 layers fused" in str(plan)
    assert "q_proj and k_proj and v_proj run by several kernels" in str(plan)


def test_a_plan_for_a_gpu_says_it(calls: list[tuple[int, ...]]) -> None:
    model = CAUSAL["llama"].make(torch.bfloat16)
    for arch in ("sm_90", "gfx942"):
        plan = accelpatch.plan(model, parse(RECIPE.replace("ROLES", ROLES)), device=KNOWN[arch])
        assert "linear layers by mine" in str(plan)
        assert "2 of 2 layers fused" in str(plan)
