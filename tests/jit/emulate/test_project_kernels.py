"""The project's own products and their norms as clang compiled them for AMD, by their C interface, against torch.

A second opinion on the emulator: neither the kernels nor the compiler know of it. The float rule holds, as on a GPU.
"""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip.attention import binding
from accelpatch.kernels.hip.binding import DTYPES
from tests.kernels.ops.attention.test_decode_attention import CASES, assert_float_rule
from tests.support.amdgcn import needs_clang
from tests.support.emulated_hip import AssemblyEmulated, launches
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


def attention(*args: Tensor | AttentionShape) -> Tensor:
    """The decode attention of the device library, launched in the emulator."""
    qkv, positions, slot, mask, keys, values, shape = args
    assert isinstance(shape, AttentionShape)
    y = torch.full((*qkv.shape[:-1], shape.heads * shape.size), float("nan"), dtype=qkv.dtype)
    held = [one for one in (*args[:-1], y, *vars(shape).values(), *shape.memory.buffers) if torch.is_tensor(one)]
    given = binding.arguments(qkv, y, positions, slot, mask, keys, values, shape, None, None)
    with launches("gfx942", "accelpatch/kernels/hip/attention/decode_attention.hip", held) as made:
        status = made.library.accelpatch_decode_attention(ctypes.byref(given), DTYPES.index(qkv.dtype), None)
    assert status == 0
    assert made.found
    return y


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grouped", "size-80", "window-and-padding", "gemma-norms"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_the_attention(name: str, dtype: torch.dtype) -> None:
    assert_float_rule(attention, CASES[name], dtype)
