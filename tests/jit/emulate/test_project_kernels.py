"""The project's own products and their norms as clang compiled them for AMD, by their C interface, against torch.

A second opinion on the emulator: neither the kernels nor the compiler know of it. The float rule holds, as on a GPU.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.support.amdgcn import needs_clang
from tests.support.emulated_hip import AssemblyEmulated
from tests.support.gemv_checks import kinds, run
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import FORMATS, pack

pytestmark = needs_clang
BF16, F16 = torch.bfloat16, torch.float16


def check(arch: str, name: str, dtype: torch.dtype, n: int, k: int, kind: str, rows: int = 3) -> None:
    torch.manual_seed(n + k)
    lib = AssemblyEmulated(arch, seed=n)
    p = pack(torch.randn(n, k) / k**0.5, name, dtype=dtype, interleaved=kind == "silu_gate")
    x, arguments = torch.randn(rows, k).to(dtype), kinds(n, k, rows, dtype, "cpu")[kind]
    y = run(lib, p, x, arguments, blocks=2)
    assert lib.launches == 1
    assert p.dense is not None
    assert wrong(y, p.dense, x, arguments) == ""


@pytest.mark.parametrize("kind", ["product", "rms", "layer", "silu_gate", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_the_gemv_of_whole_floats(kind: str, dtype: torch.dtype) -> None:
    check("gfx942", "plain", dtype, 34, 200, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["product", "rms", "silu_gate"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
def test_the_products_of_other_formats(name: str, kind: str) -> None:
    check("gfx942", name, BF16, 34, 256, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("name, dtype", [("plain", BF16), ("plain", F16), ("int8", BF16), ("int4_g128", F16)], ids=str)
def test_the_products_for_gfx90a(name: str, dtype: torch.dtype) -> None:
    check("gfx90a", name, dtype, 34, 256, "rms")


def test_the_rms_norm_is_torchs() -> None:
    """Element by element: the weights are those of the identity."""
    torch.manual_seed(5)
    x, weight, lib = torch.randn(2, 96).to(BF16), torch.rand(96).to(BF16), AssemblyEmulated("gfx942")
    y = run(lib, pack(torch.eye(96), "plain", dtype=BF16), x, {"norm": "rms", "norm_weight": weight})
    norm = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    assert ((y.double() - norm).abs() <= 2**-7 * torch.maximum(norm.abs(), norm.square().mean().sqrt())).all()


def test_a_gemv_of_64_by_256_takes_less_than_5_seconds() -> None:
    lib, p, x = (
        AssemblyEmulated("gfx942"),
        pack(torch.randn(64, 256), "plain", dtype=BF16),
        torch.randn(1, 256).to(BF16),
    )
    run(lib, p, x, {})  # compiled
    begin = time.perf_counter()
    run(lib, p, x, {})
    assert time.perf_counter() - begin < 5
