"""All execution is counted, and `forced` reaches the operations inside of others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.attention.decode_attention import decode_attention_
from accelpatch.kernels.ops.attention.prompt_attention import Shown, prompt_attention_
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.ops.step import step_end
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import CAUSAL


def generated(recipe: str, new_tokens: int = 4) -> dict[tuple[str, str], int]:
    """What ran for some new tokens of a tiny patched model on the CPU."""
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False)
    dispatch.calls.clear()
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=new_tokens, do_sample=False)
    return dict(dispatch.calls)


def test_a_fused_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: attention, sampling, the end of a step and fused linear layers, with the operations inside them."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    ran = generated("exact")
    fused = [("decode_attention", "torch"), ("greedy", "torch"), ("step_end", "torch"), ("fused_linear", "operations")]
    assert all(ran.get(one, 0) >= 3 for one in fused), ran
    assert ran["fused_linear", "operations"] > 4 * ran["decode_attention", "torch"] - 1, "four a layer, and the head"
    assert {("float_linear", "torch"), ("rmsnorm", "torch"), ("gated_activation", "torch")} <= set(ran)


@pytest.mark.skipif(native_library.why_not(probe("cpu")) is not None, reason="needs a C++ compiler")
def test_a_native_step_is_counted() -> None:
    assert generated("int8")["decode_step", "cpu"] >= 3


def test_a_prompt_of_fused_layers_is_counted() -> None:
    (qkv, _, _, _, keys, values), shape = made(
        Step(slot=0, capacity=8, rows=1, tokens=3), torch.float32, torch.device("cpu")
    )
    dispatch.calls.clear()
    prompt_attention_(qkv, torch.arange(3)[None], Shown(), keys, values, shape)
    assert dispatch.calls["prompt_rotary", "torch"] == dispatch.calls["flash_attention", "sdpa"] == 1


def test_in_place_operations_refuse_another_precision() -> None:
    args, shape = made(Step(rows=1), torch.float32, torch.device("cpu"))
    before = [one.clone() for one in args]
    with dispatch.forced("reference", torch.float64), pytest.raises(KernelError, match=r"decode_attention: .*float64"):
        decode_attention_(*args, shape)
    assert all(torch.equal(one.nan_to_num(), old.nan_to_num()) for one, old in zip(args, before, strict=True))
    dispatch.calls.clear()
    with dispatch.forced("reference"):
        decode_attention_(*args, shape)
    assert dispatch.calls["decode_attention", "reference"] == 1
    with dispatch.forced("hip"), pytest.raises(KernelError, match="'hip' cannot run here"):
        decode_attention_(*args, shape)
    state = [torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 4).long()]
    with dispatch.forced("triton"), pytest.raises(KernelError, match=r"step_end: .*Triton kernels run on GPUs"):
        step_end.end_step_(torch.zeros(1, 3), torch.zeros(1, 3), *state)


def test_forced_reaches_the_operations_inside() -> None:
    layer, norm = FusedLinear(Plain(torch.randn(8, 6))), FusedNorm(torch.rand(6) + 0.5, 1e-6)
    x = torch.randn(2, 6)
    dispatch.calls.clear()
    with dispatch.forced("reference", torch.float64):
        found = layer(x, norm, gate="silu")
    inside = {(op, "reference") for op in ("rmsnorm", "float_linear", "gated_activation")}
    assert set(dispatch.calls) == inside | {("fused_linear", "operations"), ("large_m_linear", "operations")}
    torch.testing.assert_close(found, dispatch.kernel("fused_linear").reference(layer, x, norm, "silu"))


def test_what_was_chosen_keeps_no_tensor_alive() -> None:
    layer = FusedLinear(Plain(torch.randn(24, 10)))
    layer(torch.randn(1, 10), FusedNorm(torch.ones(10), 1e-6))
    kept = weakref.ref(layer.weight.w)
    del layer
    gc.collect()
    assert kept() is None
