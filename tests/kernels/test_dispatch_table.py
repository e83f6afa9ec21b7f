"""Which implementation of each operation runs on which device for how many rows; and that all execution is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accelpatch.device import KNOWN, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.build import libraries
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton import launch

ROWS = (1, 8, 9, 24, 25, 64, 65, 513)
N, K = 2048, 1024
HIP, HIP_GEMM, HIP_UNPACK, TRITON, TORCH = "hip", "hip_gemm", "hip_unpack", "triton", "torch"
Names = tuple[str, ...]


def rows(few: str, up_to_24: str, up_to_64: str, more: str) -> Names:
    """For each of ROWS: 1 and 8; 9 and 24; 25 and 64; 65 and 513."""
    return few, few, up_to_24, up_to_24, up_to_64, up_to_64, more, more


#: (operation, group size, 0 for none) -> (on sm_90, on gfx942)
CHOSEN: dict[tuple[str, int], tuple[Names, Names]] = {
    ("gemv", 0): (rows(HIP, TRITON, TRITON, TORCH), rows(HIP, TORCH, TORCH, TORCH)),
    ("int8_linear", K): (rows(HIP, TRITON, TRITON, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("int8_linear", 128): (rows(TRITON, TRITON, TRITON, TRITON), rows(TRITON, TRITON, TRITON, TRITON)),
    ("tiled_int4_linear", 128): (rows(HIP, HIP_GEMM, HIP_GEMM, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("tiled_int4_linear", 64): (rows(HIP, TRITON, TRITON, TRITON), rows(HIP, TRITON, TRITON, TRITON)),
    ("int4_linear", 128): (rows(TORCH, TORCH, TORCH, TORCH), rows(TORCH, TORCH, TORCH, TORCH)),
    ("compact_linear", 0): (rows(HIP, HIP, HIP_UNPACK, HIP_UNPACK), rows(HIP, HIP, HIP_UNPACK, HIP_UNPACK)),
    ("fp8_linear", K): (rows(HIP, HIP, HIP, TORCH), rows(HIP, HIP, HIP, TORCH)),
}
#: what differs where there is no Triton
WITHOUT_TRITON: dict[tuple[str, int], tuple[Names, Names]] = {
    ("gemv", 0): (rows(HIP, TORCH, TORCH, TORCH), rows(HIP, TORCH, TORCH, TORCH)),
    ("int8_linear", K): (rows(HIP, HIP, HIP, TORCH), rows(HIP, HIP, HIP, TORCH)),
    ("int8_linear", 128): (rows(TORCH, TORCH, TORCH, TORCH), rows(TORCH, TORCH, TORCH, TORCH)),
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


@pytest.mark.parametrize(
    "op, name, m, group, words",
    [
        ("gemv", HIP, 9, 0, "9 rows are more than the 8"),
        ("gemv", TRITON, 8, 0, "8 rows are fewer than the 9"),
        ("gemv", TRITON, 65, 0, "65 rows are more than the 64"),
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
    [("gemv", 0, "contiguous", (TRITON, TORCH)), ("tiled_int4_linear", 128, "aligned", (HIP_GEMM, TRITON))],
)
def test_how_tensors_lie_decides(
    op: str, group: int, fact: str, chosen: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    monkeypatch.setattr(libraries, "why_not", lambda kind, device: None)
    for lies, due in zip((True, False), chosen, strict=True):
        spec = replace(asked(op, 9, group), options={fact: lies})
        assert dispatch.choose(op, spec, KNOWN["sm_90"]) == due
