"""Which implementation of each operation runs on which device for how many rows: the table, and what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import choice, dispatch, who_runs
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Int8Rows, Plain
from accelpatch.kernels.ops.attention import flash_attention, packages
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear, large_m_spec
from accelpatch.kernels.ops.linear.fused_linear import spec as fused_spec
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton import launch

ROWS = (1, 8, 9, 16, 24, 25, 32, 64, 65, 512)
ARCHS = ("sm_90", "gfx942", "cpu")
N, K = 2048, 1024
HIP, HIP_GEMM, TRITON, TORCH = "hip", "hip_gemm", "triton", "torch"
Names = tuple[str, ...]
FP8 = "8-bit floats of the device"  # in place of a form's name


def asked(op: str, m: int, group: int = 0, **options: Any) -> Spec:
    scale = None if not group else torch.float16 if "int4" in op else torch.float32
    return Spec(op, {"M": m, "N": N, "K": K, "B": 1}, torch.bfloat16, scale, group or None, options=options)


def experts_of(op: str) -> Spec:
    """Qwen3-MoE's, of which up to 32 tokens read no expert more than twice on average."""
    made = experts.of_shape(128, N, 768, torch.bfloat16, 4, (128, 128), chosen=8, tiled=True, scale_dtype=torch.float16)
    beside = {"norm_dtype": torch.bfloat16, "logits_dtype": torch.bfloat16}
    return replace(made, op=op, options={**made.options, **beside})


#: what the printed table is about: a name, and a Spec
CALLS: dict[str, Spec] = {
    "float_linear": asked("float_linear", 1),
    "int8_linear": asked("int8_linear", 1, K),
    "int8_linear, groups": asked("int8_linear", 1, 128),
    "int4_linear": asked("int4_linear", 1, 128),
    "int3_linear": asked("int3_linear", 1, 128),
    "tiled_int4_linear": asked("tiled_int4_linear", 1, 128),
    "tiled_int4_linear, 64": asked("tiled_int4_linear", 1, 64),
    "block_linear": asked("block_linear", 1, 32),
    "compact_linear": asked("compact_linear", 1),
    "fp8_linear": asked("fp8_linear", 1, K),
    "w8a8_linear, int8": asked("w8a8_linear", 1, K, form="int8"),
    "w8a8_linear, fp8": asked("w8a8_linear", 1, K, form=FP8),
    "gemm_w8a8": asked("gemm_w8a8", 1),
    "gemm_fp8": asked("gemm_fp8", 1, form=FP8),
    "gated_fp8": asked("gated_fp8", 1, form=FP8),
    "quantize_rows": asked("quantize_rows", 1, form=FP8),
    "packed_linear": asked("packed_linear", 1, 64),
    "w8a8_packed": asked("w8a8_packed", 1),
    "rmsnorm": asked("rmsnorm", 1),
    "fused_linear": asked("fused_linear", 1),
    "experts": experts_of("experts"),
    "routed_experts": experts_of("routed_experts"),
    "flash_attention": flash_attention.of_shape(32, 8, 128, torch.bfloat16, keys=4096),
}


def printed(device: Device) -> str:
    """What runs for each of ROWS: a line for each of CALLS."""
    lines = []
    for name, spec in CALLS.items():
        form = {"form": device.fp8 or "e4m3fn"} if spec.options.get("form") == FP8 else {}
        given = replace(spec, options={**spec.options, **form})
        names = [str(who_runs.runs(given, device, m).name) for m in ROWS]
        first, parts = 0, []
        for who, alike in groupby(names):
            count = len(list(alike))
            last = ROWS[first + count - 1]
            parts.append(f"{ROWS[first]}-{last} {who}" if first + count < len(ROWS) else f"{ROWS[first]}- {who}")
            first += count
        lines.append(f"{name:22} {'  '.join(parts)}")
    return "\n".join(lines) + "\n"


@pytest.fixture(params=[True, False], ids=["triton", "no-triton"])
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every library can be built, no other package is installed; whether Triton is."""
    installed: bool = request.param
    monkeypatch.setattr(launch, "_installed", lambda: installed)
    monkeypatch.setattr(
        libraries, "why_not", lambda kind, device: None if (kind == "cpu") == (device.kind == "cpu") else "not for it"
    )
    monkeypatch.setattr(packages, "installed", lambda package: False)
    return installed


@pytest.mark.parametrize("arch", ARCHS)
def test_what_runs_for_how_many_rows(arch: str, triton: bool) -> None:
    device = replace(probe("cpu"), arch="x86-64-avx2") if arch == "cpu" else KNOWN[arch]
    due = json.loads((Path(__file__).parent / "who_runs.json").read_text())
    found = printed(device)
    print(found)
    assert found.splitlines() == due[arch]["with Triton" if triton else "without Triton"]


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


GATED_ROWS = (1, 8, 9, 24, 25, 64, 65, 513)


def rows(few: str, up_to_24: str, up_to_64: str, more: str) -> Names:
    """For each of GATED_ROWS: 1 and 8; 9 and 24; 25 and 64; 65 and 513."""
    return few, few, up_to_24, up_to_24, up_to_64, up_to_64, more, more


APART = rows("operations", "operations", "operations", "operations")
#: layout -> who computes a linear layer with a SiLU gate for each of GATED_ROWS (on sm_90, on gfx942)
GATED: dict[str, tuple[Names, Names]] = {
    "plain": (rows("operations", TRITON, TRITON, "operations"), APART),
    "int8": (APART, APART),
    "compact": (APART, APART),
    "int4": (("operations", "operations", HIP_GEMM, *["operations"] * 5), APART),
    "int4-not-interleaved": (APART, APART),
}


@pytest.mark.parametrize("layout", GATED)
def test_who_applies_the_gate(layout: str, triton: bool) -> None:
    layer, due = fused(layout), GATED[layout]
    for arch, names in zip(("sm_90", "gfx942"), due, strict=True):
        for m, name in zip(GATED_ROWS, names, strict=True):
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
        ("float_linear", HIP, 65, 0, "65 rows are more than the 64"),
        ("float_linear", TRITON, 0, 0, "x has no rows"),
        ("int8_linear", HIP, 65, K, "65 rows are more than the"),
        ("tiled_int4_linear", HIP_GEMM, 65, 128, "65 rows are more than the 64"),
        ("compact_linear", HIP, 65, 0, "65 rows are more than the 64"),
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


def test_every_operation_has_rows_and_every_implementation_an_order() -> None:
    assert choice.TABLE.keys() == dispatch.TABLE.keys()
    for op, rows in choice.TABLE.items():
        held = dispatch.kernel(op).implementations
        named = {name for row in rows for name in row.order}
        assert named == set(held), op
        last = rows[-1]
        assert (last.on, last.dtypes, last.rows) == ("*", (), choice.EVERY), f"{op}: the last row fits every call"
        assert (last.sizes, last.multiples, last.options) == ({}, {}, {}), op
        assert all(len(set(row.order)) == len(row.order) for row in rows), op


PREFERENCE = re.compile(r"faster|slower|fastest|measured|streamed|gains", re.I)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("triton")
def test_a_reason_is_no_preference(call: str) -> None:
    spec, said = CALLS[call], set()
    given = [replace(spec, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    given += [replace(one, group_size=48, offset="minimum", options={**one.options, "bits": 3}) for one in given]
    given += [replace(one, sizes={**one.sizes, "K": 1 << 28, "D": 1024}) for one in given]
    for one, device, m in product(given, (*KNOWN.values(), probe("cpu")), (0, *ROWS, 1 << 30)):
        sized = replace(one, sizes={**one.sizes, choice.rows_of(one.op): m})
        for name in dispatch.kernel(one.op).implementations:
            said.add(str(dispatch.why_not(one.op, name, sized, device)))
    assert len(said) > 1 or all(len(dispatch.kernel(spec.op).implementations) == 1 for _ in said)
    assert not [reason for reason in said if PREFERENCE.search(reason)]


@pytest.mark.parametrize(
    "call, name, m",
    [("float_linear", HIP, 9), ("float_linear", TRITON, 1), ("float_linear", TRITON, 65), ("int8_linear", HIP, 64),
     ("tiled_int4_linear", HIP_GEMM, 1), ("tiled_int4_linear", HIP, 64), ("compact_linear", HIP, 64),
     ("w8a8_linear, int8", HIP, 64), ("experts", HIP, 4096), ("gated_fp8", TRITON, 1), ("gemm_fp8", "scaled_mm", 64)],
)  # fmt: skip
@pytest.mark.parametrize("triton", [True], indirect=True)
@pytest.mark.usefixtures("triton")
def test_what_is_not_preferred_can_run(call: str, name: str, m: int) -> None:
    spec, device = CALLS[call], KNOWN["sm_90"]
    form = {"form": "e4m3fn"} if "form" in spec.options and spec.options["form"] == FP8 else {}
    spec = replace(spec, sizes={**spec.sizes, "M": m}, options={**spec.options, **form})
    assert dispatch.choose(spec.op, spec, device) != name
    assert dispatch.why_not(spec.op, name, spec, device) is None


def test_what_is_not_preferred_runs_where_it_is_forced() -> None:
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    reason = native_library.why_not(probe("cpu"))
    wanted = "eager" if reason else "cpu"  # too few scores for it to be taken
    args = (q, k, v, None, None, None, True, 0, 0.0, 0.25)
    assert dispatch.choose("flash_attention", dispatch.kernel("flash_attention").spec(*args), probe("cpu")) == "sdpa"
    dispatch.calls.clear()
    with dispatch.forced(wanted):
        found = flash_attention.flash_attention(*args)
    assert dispatch.calls["flash_attention", wanted] == 1
    torch.testing.assert_close(found, flash_attention.reference(*args))


@pytest.mark.parametrize("triton", [True], indirect=True)
@pytest.mark.usefixtures("triton")
def test_the_table_of_a_plan() -> None:
    int8, tiled = CALLS["int8_linear"], CALLS["tiled_int4_linear"]
    text = who_runs.table([int8, int8, tiled, CALLS["flash_attention"]], KNOWN["sm_90"]).splitlines()
    assert text[0] == "which implementation runs for how many rows, on NVIDIA H200 (sm_90):"
    assert "  int8_linear  1-8 hip  9-512 triton_wgmma  513- triton" in text
    assert "  tiled_int4_linear  1-8 hip  9-16 hip_gemm  17-256 triton_wgmma  257- triton" in text
    assert "    257- not hip_gemm: 257 rows are more than the 64 that it takes" in text
    assert any(line.startswith("  flash_attention  1-127 sdpa  128-2047 triton  2048- sdpa_cudnn") for line in text)
    assert sum("int8_linear" in line for line in text) == 1
    wide = replace(int8, dtype=torch.float32)
    both = who_runs.table([int8, wide], KNOWN["sm_90"])
    assert f"int8_linear of {N}x{K}x1  1- triton" in both
    assert "1- not hip: its activations are bfloat16 or float16, not torch.float32" in both
    assert who_runs.table([], KNOWN["sm_90"]) == ""


def test_experts_are_read_for_themselves_up_to_a_number_of_tokens() -> None:
    at = {m: choice.row("experts", replace(CALLS["experts"], sizes={**CALLS["experts"].sizes, "M": m}), probe("cpu"))
          for m in (1, 32, 33)}  # fmt: skip
    assert [row.order[0] for row in at.values()] == [HIP, HIP, TRITON]
