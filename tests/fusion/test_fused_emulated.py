"""Whole steps of a patched model by the device library, compiled for the CPU: signals change no bit."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.fusion import fused_layer, read_layers
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.experts import binding as hip_experts
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import routed_experts
from accelpatch.kernels.ops.linear import fused_linear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.spec import Implementation
from accelpatch.modules import quantized_experts
from accelpatch.modules.quantized_experts import PARTS, QuantizedExperts
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.kernels.hip.simt_emulator import ATTENTION, COMPILER, compiled
from tests.support.interpreted import DEVICE
from tests.support.steps import assert_float_rule, logits, silence
from tests.support.tiny import CAUSAL, padded_batch

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_fused_gpu.py is for a GPU"),
]
EXPERT_SOURCES = ("experts/experts_int4.hip",)
EXPERTS_IN_4_BITS = "extends: exact\nrules:\n  - match: {role: experts}\n    replace: int4_experts\n"
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 4224, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": None,
}  # fmt: skip


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Steps on the CPU go the way of a GPU's; which kernels are given a count to wait for. None overlaps."""
    library = compiled("nvidia", ["gemv/gemv.hip", *EXPERT_SOURCES, *ATTENTION], "steps", tmp_path_factory)
    library.set_emulator(4, 1, 0)
    library.set_clusters(1)
    library.set_beside(1)
    names: list[str] = []

    def product(weight: Any, args: binding.GemvArgs, x: Tensor) -> None:
        names.extend(["product"] if args.consumer else [])
        if args.producer and args.m == 1:
            assert set((ctypes.c_int16 * (args.producer_columns)).from_address(args.y)) == {binding.SENTINEL}
        binding.check(binding.declared(library, "accelpatch_gemv")(ctypes.byref(args), 0, None), weight.function)

    def attend(qkv: Tensor, *rest: Any) -> None:
        args = attention.arguments(qkv, *rest)
        names.extend(["attention"] if args.consumer else [])
        assert library.accelpatch_decode_attention(ctypes.byref(args), 0, ctypes.c_void_p()) == 0

    def call(self: FusedLinear, x: Tensor, norm: FusedNorm | None, gate: str | None, residual: Tensor | None) -> Tensor:
        return fused_linear.by_hip(self, x, norm, gate, residual)

    monkeypatch.setattr(binding, "_start", product)
    monkeypatch.setattr(attention, "_launch", attend)
    monkeypatch.setattr(hip_experts, "_entry", lambda name, *_: hip_experts.declared(library, name))
    monkeypatch.setattr(binding, "stream_of", lambda x: None)
    monkeypatch.setattr(FusedLinear, "_by_operations", call)
    monkeypatch.setattr(fused_layer, "decode_attention_", attention.decode_attention_)
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    return names


@pytest.mark.parametrize("name, rows", [("mistral", 1), ("mistral", 2), ("mistral", 8), ("starcoder2", 1)])
def test_the_bits_of_kernels_that_wait(
    name: str, rows: int, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(2, 90, (rows, 253), generator=torch.Generator().manual_seed(1))  # and over the end of a span
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][-1, : 7 * (rows - 1)] = 0
    base = CAUSAL[name].make(torch.bfloat16, **SHAPE)
    model: Any = accelpatch.patch(copy.deepcopy(base), "exact", verify=False)
    early = logits(model, batch, 6)
    assert set(waiting) == {"attention", "product"}
    layers = vars(model)[RUNTIME].captured.fused.layers
    assert not any(int(one.producer.number.abs().sum()) for layer in layers for one in (layer.qkv, layer.gate_up))
    monkeypatch.setattr(read_layers, "with_signals", silence)
    waiting.clear()
    assert torch.equal(logits(accelpatch.patch(base, "exact", verify=False), batch, 6), early)
    assert not waiting


@pytest.mark.parametrize("name", ["stablelm", "cohere", "gpt_neox", "phi", "starcoder2", "opt", "gpt2"])
def test_layer_norms_and_plain_mlps(name: str, waiting: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device library gets of a LayerNorm, its bias and an activation is what the modules compute."""
    asked: list[dict[str, Any]] = []
    stock = binding.launch

    def launch(weight: Any, x: Tensor, **given: Any) -> Tensor:
        asked.append(given)
        return stock(weight, x, **given)

    monkeypatch.setattr(binding, "launch", launch)
    changes: dict[str, Any] = {"word_embed_proj_dim": 64} if name == "opt" else {}
    model: Any = accelpatch.patch(CAUSAL[name].make(torch.bfloat16, **changes), "exact", verify=False)
    assert_float_rule(model, padded_batch(), 6)
    assert {one["norm"] for one in asked} == {"layer", "none"}
    assert any(one["norm_bias"] is not None for one in asked) == (name != "cohere")
    kinds = {"stablelm": "silu_gate", "cohere": "silu_gate", "gpt_neox": "gelu", "opt": "relu"}
    assert {one["activation"] for one in asked} == {"none", kinds.get(name, "gelu_tanh")}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_take_norm_and_choice_in(name: str, waiting: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's six launches: what the experts' two get is the residual stream and the router's logits."""
    asked: list[tuple[Any, ...]] = []

    def tiles(up: Any, down: Any, *_: Any) -> Any:
        made = [Stack.of_tiles(*(one[part] for part in PARTS), interleaved=one is up) for one in (up, down)]
        return made[0], made[1]

    def routed(*args: Any) -> Tensor:
        asked.append(args)
        return routed_experts.by_hip(*args)

    monkeypatch.setattr(quantized_experts, "tiles_for", tiles)
    monkeypatch.setattr(QuantizedExperts, "why_not_routed", lambda self, chosen, dtype: None)
    entry = routed_experts.KERNELS[routed_experts.OP]
    by_hip = {**entry.implementations, "hip": Implementation(routed, dispatch.anywhere)}
    monkeypatch.setitem(routed_experts.KERNELS, routed_experts.OP, replace(entry, implementations=by_hip))
    monkeypatch.setattr(dispatch, "_selected", {})
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    sizes = sizes if name == "qwen3_moe" else {key: sizes[key] for key in ("hidden_size", "intermediate_size")}
    model: Any = accelpatch.patch(CAUSAL[name].make(torch.bfloat16, **sizes), parse(EXPERTS_IN_4_BITS), verify=False)
    assert_float_rule(model, padded_batch(), 6)
    layers = 2 if name == "mixtral" else 1
    assert len(asked) >= 2 * 5 * layers  # assert_float_rule has two runs of five steps behind a prompt
    assert all(args[0] is args[-1] and args[4].shape[1] == 4 for args in asked)
