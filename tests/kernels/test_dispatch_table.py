"""Which implementation of each operation runs on which device for how many rows; and that all execution is counted."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Int8Rows, Plain
from accelpatch.kernels.ops.attention.decode_attention import decode_attention_
from accelpatch.kernels.ops.attention.prompt_attention import Shown, prompt_attention_
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear, large_m_spec
from accelpatch.kernels.ops.linear.fused_linear import spec as fused_spec
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.ops.step import step_end
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton import launch
from accelpatch.runtime.graphs import captured_graph
from accelpatch.runtime.graphs.captured_graph import EagerGraph
from tests.support.tiny import CAUSAL

ROWS = (1, 8, 9, 24, 25, 64, 65, 513)
N, K = 2048, 1024
HIP, HIP_GEMM, HIP_UNPACK, TRITON, TORCH = "hip", "hip_gemm", "hip_unpack", "triton", "torch"
Names = tuple[str, ...]


def rows(few: str, up_to_24: str, up_to_64: str, more: str) -> Names:
    """For each of ROWS: 1 and 8; 9 and 24; 25 and 64; 65 and 513."""
    return few, few, up_to_24, up_to_24, up_to_64, up_to_64, more, more


#: (operation, group size, 0 for none) -> (on sm_90, on gfx942)
CHOSEN: dict[tuple[str, int], tuple[Names, Names]] = {
    ("float_linear", 0): (rows(HIP, TRITON, TRITON, TORCH), rows(HIP, TORCH, TORCH, TORCH)),
    ("int8_linear", K): (rows(HIP, TRITON, TRITON, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("int8_linear", 128): (rows(TRITON, TRITON, TRITON, TRITON), rows(TRITON, TRITON, TRITON, TRITON)),
    ("tiled_int4_linear", 128): (rows(HIP, HIP_GEMM, HIP_GEMM, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("tiled_int4_linear", 64): (rows(HIP, TRITON, TRITON, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("int4_linear", 128): (rows(TORCH, TORCH, TORCH, TORCH), rows(TORCH, TORCH, TORCH, TORCH)),
    ("block_linear", 32): (rows(TRITON, TRITON, TRITON, TRITON), rows(TRITON, TRITON, TRITON, TRITON)),
    ("compact_linear", 0): (rows(HIP, HIP, HIP_UNPACK, HIP_UNPACK), rows(HIP, HIP, HIP_UNPACK, HIP_UNPACK)),
    ("fp8_linear", K): (rows(HIP, HIP, HIP, TORCH), rows(HIP, HIP, HIP, TORCH)),
}
#: what differs where there is no Triton
WITHOUT_TRITON: dict[tuple[str, int], tuple[Names, Names]] = {
    ("float_linear", 0): (rows(HIP, TORCH, TORCH, TORCH), rows(HIP, TORCH, TORCH, TORCH)),
    ("int8_linear", K): (rows(HIP, HIP, HIP, TORCH), rows(HIP, HIP, HIP, TORCH)),
    ("int8_linear", 128): (rows(TORCH, TORCH, TORCH, TORCH), rows(TORCH, TORCH, TORCH, TORCH)),
    ("block_linear", 32): (rows(TORCH, TORCH, TORCH, TORCH), rows(TORCH, TORCH, TORCH, TORCH)),
    ("tiled_int4_linear", 128): (rows(HIP, HIP_GEMM, HIP_GEMM, TORCH), rows(HIP, HIP, HIP, TORCH)),
    ("tiled_int4_linear", 64): (rows(HIP, HIP, HIP, TORCH), rows(HIP, HIP, HIP, TORCH)),
}


def asked(op: str, m: int, group: int) -> Spec:
    scale = None if not group else torch.float16 if "int4" in op else torch.float32
    return Spec(op, {"M": m, "N": N, "K": K}, torch.bfloat16, scale, group or None)


@pytest.fixture(params=[True, False], ids=["triton", "no-triton"])
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Device libraries can be built for every GPU; whether Triton is installed."""
    installed: bool = request.param
    monkeypatch.setattr(launch, "_installed", lambda: installed)
    monkeypatch.setattr(libraries, "why_not", lambda kind, device: None if device.kind == "cuda" else "no GPU")
    return installed


@pytest.mark.parametrize("op, group", CHOSEN, ids=[f"{op}-{group}" for op, group in CHOSEN])
def test_who_runs_which_rows(op: str, group: int, triton: bool) -> None:
    table = CHOSEN if triton else {**CHOSEN, **WITHOUT_TRITON}
    for arch, due in zip(("sm_90", "gfx942"), table[op, group], strict=True):
        assert tuple(dispatch.choose(op, asked(op, m, group), KNOWN[arch]) for m in ROWS) == due, arch
    assert {dispatch.choose(op, asked(op, m, group), probe("cpu")) for m in ROWS} == {TORCH}


def test_every_linear_operation_is_in_the_table() -> None:
    canonical = {op for op in dispatch.TABLE if dispatch.kernel(op).blocks is not None and not op.startswith("packed_")}
    assert {op for op, _ in CHOSEN} == canonical


def fused(layout: str) -> FusedLinear:
    """A gate and its up, of 2,048 rows in all."""
    if layout == "plain":
        return FusedLinear(Plain(torch.zeros(N, 256, dtype=torch.bfloat16)))
    if layout == "int8":
        return FusedLinear(Int8Rows(torch.zeros(N, 256, dtype=torch.int8), torch.ones(N, 1)))
    if layout == "compact":
        return FusedLinear(CompactTiles.pack(torch.ones(N, 256).bfloat16()).pair())
    tiles = Tiles.pack(torch.zeros(N, 128, dtype=torch.int8), torch.ones(N, 2).half(), None)
    return FusedLinear(tiles.pair() if layout == "int4" else tiles)


APART = rows("operations", "operations", "operations", "operations")
#: layout -> who computes a linear layer with a SiLU gate for each of ROWS (on sm_90, on gfx942)
GATED: dict[str, tuple[Names, Names]] = {
    "plain": (rows("operations", TRITON, TRITON, "operations"), APART),
    "int8": (APART, APART),
    "compact": (APART, APART),
    "int4": (rows("operations", HIP_GEMM, HIP_GEMM, "operations"), APART),
    "int4-not-interleaved": (APART, APART),
}


@pytest.mark.parametrize("layout", GATED)
def test_who_applies_the_gate(layout: str, triton: bool) -> None:
    layer, due = fused(layout), GATED[layout]
    for arch, names in zip(("sm_90", "gfx942"), due, strict=True):
        for m, name in zip(ROWS, names, strict=True):
            x = torch.zeros(m, 256, dtype=torch.bfloat16)
            spec = large_m_spec(layer, x, "silu")
            expected = "operations" if name == TRITON and not triton else name
            assert dispatch.choose("large_m_linear", spec, KNOWN[arch]) == expected, (arch, m)
            assert dispatch.choose("large_m_linear", large_m_spec(layer, x, "gelu"), KNOWN[arch]) == "operations"
            assert dispatch.choose("large_m_linear", spec, probe("cpu")) == "operations"


@pytest.mark.parametrize("layout", GATED)
@pytest.mark.usefixtures("triton")
def test_few_rows_are_one_launch_on_a_gpu(layout: str) -> None:
    layer, signal = fused(layout), Signal(torch.zeros(2, dtype=torch.int32), 16, torch.zeros(N, dtype=torch.int16))
    x = torch.zeros(8, 256, dtype=torch.bfloat16)
    for one in (layer, replace(layer, producer=signal)):
        assert dispatch.choose("fused_linear", fused_spec(one, x), KNOWN["sm_90"]) == HIP
        assert dispatch.choose("fused_linear", fused_spec(one, x), KNOWN["gfx942"]) == HIP
        assert dispatch.choose("fused_linear", fused_spec(one, x), probe("cpu")) == "operations"
    wide = fused_spec(replace(layer, consumer=signal), x.float())
    with pytest.raises(KernelError, match="wait for the flag"):
        dispatch.choose("fused_linear", wide, KNOWN["sm_90"])


@pytest.mark.parametrize(
    "op, name, m, group, words",
    [
        ("float_linear", HIP, 9, 0, "9 rows are more than the 8"),
        ("float_linear", TRITON, 8, 0, "8 rows are fewer than the 9"),
        ("float_linear", TRITON, 65, 0, "65 rows are more than the 64"),
        ("int8_linear", HIP, 65, K, "65 rows are more than the"),
        ("tiled_int4_linear", HIP_GEMM, 8, 128, "8 rows are fewer than the 9"),
        ("compact_linear", HIP, 25, 0, "25 rows are more than the 24"),
        ("fp8_linear", HIP, 65, K, "65 rows are more than the 64"),
    ],
)
def test_limits_on_rows_are_said(op: str, name: str, m: int, group: int, words: str, triton: bool) -> None:
    reason = str(dispatch.why_not(op, name, asked(op, m, group), KNOWN["sm_90"]))
    assert words in reason or (name == TRITON and not triton and "not installed" in reason)


@pytest.mark.parametrize(
    "op, group, fact, chosen",
    [("float_linear", 0, "contiguous", (TRITON, TORCH)), ("tiled_int4_linear", 128, "aligned", (HIP_GEMM, TRITON))],
)
def test_how_tensors_lie_decides(
    op: str, group: int, fact: str, chosen: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    monkeypatch.setattr(libraries, "why_not", lambda kind, device: None)
    for lies, due in zip((True, False), chosen, strict=True):
        spec = replace(asked(op, 9, group), options={fact: lies})
        assert dispatch.choose(op, spec, KNOWN["sm_90"]) == due


def generated(recipe: str, new_tokens: int = 4) -> dict[tuple[str, str], int]:
    """What ran for some new tokens of a tiny patched model on the CPU."""
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), recipe, verify=False)
    dispatch.calls.clear()
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=new_tokens, do_sample=False)
    return dict(dispatch.calls)


def test_a_fused_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: attention, sampling, the end of a step and fused linear layers, with the operations inside them."""
    monkeypatch.setitem(captured_graph.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
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
