"""Whose product of many tokens with int4 weights runs: the device library's own, or another's."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import KNOWN
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.codebooks import scale_dtype
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.ops.linear import tiled_int4_linear
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.gemv_reference import reference
from tests.support.interpreted import DEVICE


@pytest.mark.parametrize(
    "arch, k, group, cut, takes",
    [
        ("sm_90", 256, 128, 0, True),
        ("sm_90", 256, 256, 8, True),
        ("sm_90", 136, 136, 0, True),
        ("sm_90", 132, 132, 0, False),
        ("sm_90", 256, 128, 4, False),
        ("sm_90", 256, 64, 0, False),
        ("sm_80", 256, 128, 0, False),
        ("gfx942", 256, 128, 0, False),
    ],
)
def test_takes_many(arch: str, k: int, group: int, cut: int, takes: bool) -> None:
    """cut: values of x before each row that is given."""
    q, scale = torch.zeros(16, k // 2, dtype=torch.int8), torch.ones(16, k // group, dtype=torch.float16)
    x = torch.zeros(65, cut + k, dtype=torch.bfloat16)[:, cut:]
    tiles = Tiles.pack(q, scale, None)
    with dispatch.forced("hip_gemm"):  # else nothing is asked about up to 8 rows, which others take
        facts = {m: dict(tiled_int4_linear.facts(x[:m])) for m in (0, 1, 8, 9, 64, 65)}
    for m, options in facts.items():
        asked = replace(tiled_int4_linear.spec(x[:m], *tiles, None), options=options)
        assert (tiled_int4_linear.gemm_why_not(asked, KNOWN[arch]) is None) == (takes and 0 < m < 65)
        if m > 8:
            assert dict(tiled_int4_linear.facts(x[:m])) == options
        else:
            assert not tiled_int4_linear.facts(x[:m])


@pytest.mark.parametrize("codes, group", [("nf4", 64), ("fp4", 32), ("e2m1", 32)])
def test_few_tokens_with_codes_of_a_table_run_by_hip(codes: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "why_not", lambda name, device: None)
    scale = torch.ones(16, 256 // group).to(scale_dtype(codes))
    tiles = Tiles.pack(torch.zeros(16, 128, dtype=torch.int8), scale, codes=codes)
    asked = tiled_int4_linear.spec(torch.zeros(8, 256, dtype=torch.bfloat16), *tiles, None)
    assert dispatch.choose(tiled_int4_linear.OP, asked, KNOWN["sm_90"]) == "hip"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a machine with an H200 would launch, run by the emulator: the functions' names."""
    library = compiled("nvidia", ["gemm/int4_gemm.hip"], "rows", tmp_path_factory)
    library.set_emulator(3, 1, 0)
    library.set_shared(0x3E)
    names: list[str] = []

    def start(weight: WeightArguments, args: binding.GemvArgs, x: Tensor) -> None:
        names.append(weight.function)
        entry = binding.declared(library, f"accelpatch_{weight.function}")
        binding.check(entry(ctypes.byref(args), binding.DTYPES.index(x.dtype), weight.form, None), weight.function)

    monkeypatch.setattr(binding, "_start", start)
    return names


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_ops_on_gpu.py is for a GPU")
@pytest.mark.parametrize("part", ["all", "both", "gate", "up"])
@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
def test_the_operation(part: str, dtype: torch.dtype, launched: list[str]) -> None:
    """Paired tiles, a bias, x[2, 7, K] that is part of a wider tensor; by the float rule."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-128, 128, (96, 128), generator=generator, dtype=torch.int8)
    scale, least = (torch.rand(2, 96, 2, generator=generator) / 100).half()
    tiles = Tiles.pack(q, scale, least)
    if part != "all":
        tiles = tiles.pair()
        tiles = tiles if part == "both" else tiles.replace(n=48, part=part)
    x = torch.randn(2, 7, 264, generator=generator).to(dtype)[..., 8:]
    args = (x, *tiles, torch.randn(tiles.n, generator=generator).to(dtype))
    y = tiled_int4_linear.by_hip_gemm(*args)
    assert launched == ["int4_gemm"]
    wide, bias = tiled_int4_linear.dense(torch.float64, *args[1:])
    right = functional.linear(x.double(), wide, None if bias is None else bias.double())
    plain = tiled_int4_linear.reference(*args)
    assert not parity.compare(y, right, parity.torch_error(plain, right)).reason


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_ops_on_gpu.py is for a GPU")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
def test_the_gate(dtype: torch.dtype, biased: bool, launched: list[str]) -> None:
    """Inside the launch, with a value that is not finite; no further from the exact result than two operations."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randint(-128, 128, (96, 128), generator=generator, dtype=torch.int8)
    scale, least = (torch.rand(2, 96, 2, generator=generator) / 100).half()
    both = Tiles.pack(q, scale, least).pair()
    x = torch.randn(20, 256, generator=generator).to(dtype)
    x[7, 3] = float("inf")
    bias = torch.randn(96, generator=generator).to(dtype) if biased else None
    y = tiled_int4_linear.gated_many(x, both, bias)
    assert launched == ["int4_gemm"]
    right, plain = (
        reference(tiled_int4_linear.dense(wide, *both, None)[0], x, {"activation": "silu_gate", "bias": bias}, wide)
        for wide in (torch.float64, dtype)
    )
    assert not parity.compare(y, right, parity.torch_error(plain, right)).reason
