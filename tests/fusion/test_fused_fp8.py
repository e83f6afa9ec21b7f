"""Fused layers of 8-bit floats, and of int8 beside them: steps and prompts take rows in the form of the weight.

As in test_fused_layer.py the CPU is put into the table of graphs; products and attention run as torch operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.fusion.fused_layer import activations_of
from accelpatch.fusion.read_layers import fused_model
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import CAUSAL, full_batch

PROMPT = 70


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")


@pytest.mark.parametrize("name, gated", [("llama", 1), ("gpt2", 0), ("gemma3", 1), ("cohere", 1)])
def test_prompts_and_steps_take_rows_of_8_bit_floats(name: str, gated: int) -> None:
    """gated: whether a prompt has gates, whose outputs are rows of 8-bit floats at once."""
    model: Any = accelpatch.patch(CAUSAL[name].make(), "fp8")
    verification = model.accelpatch.report().verification
    assert (verification.failures, verification.fused_layers) == ([], 2)
    dispatch.calls.clear()
    ids = torch.arange(2, PROMPT + 2)[None]
    model.generate(ids, max_new_tokens=4, do_sample=False)
    ran = dispatch.calls
    assert ran["fused_linear", "operations"] >= 3 * (4 * 2 + 1)
    assert ran["gemm_fp8", "torch"] >= 3 * 8
    assert ran["gated_rows", "operations"] == 2 * gated
    assert not any(op == "gemm_w8a8" for op, _ in ran)


def test_q_k_and_v_are_one_weight_of_which_the_modules_have_views() -> None:
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), "fp8", verify=False)
    with torch.no_grad():
        due = model(**full_batch()).logits
        fused = fused_model(model)
        assert torch.equal(model(**full_batch()).logits, due)
    layer, attention = fused.layers[0], model.model.layers[0].self_attn
    assert layer is not None
    assert layer.qkv.weight.w.dtype == FP8[0]
    assert attention.v_proj.layout.w.untyped_storage().data_ptr() == layer.qkv.weight.w.untyped_storage().data_ptr()
    assert activations_of(layer.qkv) == activations_of(layer.gate_up) == (FP8[0], None)


def test_one_norm_gives_rows_of_one_form() -> None:
    """Cohere's norm feeds attention and MLP: where only one of them takes 8-bit floats, each gets its own rows."""
    recipe = "name: mixed\nextends: fp8\nrules:\n  - match: {role: [gate_proj, up_proj]}\n    replace: w8a8\n"
    model: Any = accelpatch.patch(CAUSAL["cohere"].make(), accelpatch.recipe.parse(recipe), verify=False)
    layer = fused_model(model).layers[0]
    assert layer is not None
    assert activations_of(layer.qkv) == (FP8[0], None)
    assert activations_of(layer.gate_up) == (torch.int8, None)
    ids = torch.arange(2, PROMPT + 2)[None]
    dispatch.calls.clear()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, PROMPT + 2)
    assert {op for op, _ in dispatch.calls} >= {"gemm_fp8", "gemm_w8a8"}
