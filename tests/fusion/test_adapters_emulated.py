"""Whole steps of a model with adapters by the device library, compiled for the CPU: a launch a linear layer."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.fusion import fused_layer
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.low_rank import SUFFIX
from accelpatch.kernels.ops.linear import adapted_linear, fused_linear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.spec import Implementation, Spec
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.kernels.hip.simt_emulator import ATTENTION, COMPILER, compiled
from tests.support.interpreted import DEVICE
from tests.support.lora import adapted
from tests.support.low_rank import ready
from tests.support.steps import assert_float_rule, inner, logits
from tests.support.tiny import CAUSAL

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; tests/adapters/test_on_gpu.py is"),
]
LAYERS = 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Steps on the CPU go the way of a GPU's; the names of the functions that were launched, one after the other."""
    inside, plain = f"gemv{SUFFIX}", compiled("nvidia", ["gemv/gemv.hip", *ATTENTION], "plain", tmp_path_factory)
    libraries = {"gemv": plain, inside: compiled("nvidia", [f"gemv/{inside}.hip"], inside, tmp_path_factory)}
    for library in libraries.values():
        library.set_emulator(4, 1, 0)
        library.set_clusters(1)
        library.set_beside(1)
    names: list[str] = []

    def product(weight: Any, args: binding.GemvArgs, x: Tensor) -> None:
        names.append(weight.function)
        function = binding.declared(libraries[weight.function], f"accelpatch_{weight.function}")
        binding.check(function(ctypes.byref(args), 0, None), weight.function)

    def attend(qkv: Tensor, *rest: Any) -> None:
        names.append("attention")
        args = attention.arguments(qkv, *rest)
        assert plain.accelpatch_decode_attention(ctypes.byref(args), 0, ctypes.c_void_p()) == 0

    def call(self: FusedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None) -> Tensor:
        return fused_linear.by_hip(self, x, norm, gate, residual)

    entry = adapted_linear.KERNELS[adapted_linear.ADAPTED]
    by_hip = {**entry.implementations, "hip": Implementation(adapted_linear.by_hip, dispatch.anywhere)}
    monkeypatch.setitem(adapted_linear.KERNELS, adapted_linear.ADAPTED, replace(entry, implementations=by_hip))
    monkeypatch.setattr(dispatch, "_selected", {})
    monkeypatch.setattr(binding, "_start", product)
    monkeypatch.setattr(binding, "stream_of", lambda x: None)
    monkeypatch.setattr(attention, "_launch", attend)
    monkeypatch.setattr(FusedLinear, "_by_operations", call)
    monkeypatch.setattr(fused_layer, "decode_attention_", attention.decode_attention_)
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    return names


def batch_of(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(2, 90, (rows, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][-1, : 2 * (rows > 1)] = 0
    return batch


def made(name: str, **changes: Any) -> Any:
    model = CAUSAL[name].make(torch.bfloat16, num_hidden_layers=LAYERS)
    return adapted(accelpatch.patch(model, "exact", verify=False), **changes)


def fused_layers(model: Any) -> tuple[Any, ...]:
    layers: tuple[Any, ...] = vars(inner(model))[RUNTIME].captured.fused.layers
    return layers


@pytest.mark.parametrize("name, rows", [("mistral", 1), ("mistral", 2), ("mistral", 8), ("qwen2", 1), ("phi3", 2)])
def test_a_layer_with_adapters_takes_five_launches(name: str, rows: int, launched: list[str]) -> None:
    model = made(name)
    assert_float_rule(model, batch_of(rows), 6)
    launched.clear()
    logits(model, batch_of(rows), 6)
    steps = 5
    assert Counter(launched) == {"attention": steps * LAYERS, f"gemv{SUFFIX}": steps * 4 * LAYERS, "gemv": steps}
    for layer in fused_layers(model):
        for one in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert ready(one.low.words)


def test_layers_without_adapters_keep_their_launches(launched: list[str]) -> None:
    model = made("mistral", target_modules=["q_proj", "v_proj"], rank=3)
    assert_float_rule(model, batch_of(1), 6)
    launched.clear()
    logits(model, batch_of(1), 6)
    assert Counter(launched) == {"attention": 10, f"gemv{SUFFIX}": 10, "gemv": 35}


def test_adapters_that_are_switched_off_cost_nothing(launched: list[str]) -> None:
    model = made("mistral")
    with model.disable_adapter():
        logits(model, batch_of(1), 6)
    assert set(launched) == {"attention", "gemv"}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"inside": False}, "no launch with adapters inside has its gate"),
        ({"ranks": 520}, "520 ranks, more than 512"),
        ({"function": ("gemv_w8a8", "")}, "gemv_w8a8 has no form with adapters inside"),
    ],
    ids=["gate", "ranks", "format"],
)
def test_why_no_one_launch_has_them(changes: dict[str, Any], why: str) -> None:
    options = {"inside": True, "ranks": 48, "function": ("gemv", "")} | changes
    spec = Spec(adapted_linear.ADAPTED, {"M": 1, "N": 64, "K": 64}, torch.bfloat16, options=options)
    assert why in str(adapted_linear.hip_why_not(spec, KNOWN["sm_90"]))
    assert dispatch.choose(adapted_linear.ADAPTED, spec, KNOWN["sm_90"]) == "operations"
