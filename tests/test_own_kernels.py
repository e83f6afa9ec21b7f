"""The GEMV of examples/ in each form: its numbers for any K by the float rule, and what AMD's compiler makes of it."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.check import parity
from accelpatch.kernels.compiling import binary, resources
from tests.support import plugins
from tests.support.amd_toolchain import ARCHS, hipcc, needs_amd_clang
from tests.support.small_library import COMPILER, needs_compiler

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SIMT = ROOT / "tests/support/simt_threads"
HALVES = (torch.bfloat16, torch.float16)
#: m, n, k, bias: every remainder of 8, K of a down_proj that is no multiple of 2048, one that is below a vector
CASES = [(1, 3, k, k % 2 == 0) for k in (1, 2, 7, 8, 9, 15, 16, 17, 255, 256, 257, 2047, 2049)]
CASES += [(1, 9, 11008, True), (3, 5, 2052, False), (8, 17, 333, True), (2, 1, 4096, False)]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a plugin adds is taken out again."""
    yield
    plugins.forget()


def within_the_float_rule(run: Callable[[Tensor, Tensor, Tensor | None], Tensor], dtype: torch.dtype) -> None:
    """Every case, with the output and what lies around the inputs poisoned."""
    generator = torch.Generator().manual_seed(3)
    for m, n, k, has_bias in CASES:
        held = torch.full((m * k + n * k + 64,), float("nan"), dtype=dtype)
        x, w = held[32 : 32 + m * k].view(m, k), held[32 + m * k : 32 + m * k + n * k].view(n, k)
        x.copy_(torch.randn(m, k, generator=generator))
        w.copy_(torch.randn(n, k, generator=generator) / k**0.5)
        bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
        exact = functional.linear(x.double(), w.double(), None if bias is None else bias.double())
        found = parity.compare(run(x, w, bias), exact, parity.torch_error(functional.linear(x, w, bias), exact))
        assert found.ok, (m, n, k, found.reason)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_form_for_a_cpu(dtype: torch.dtype) -> None:
    run = runpy.run_path(str(EXAMPLES / "my_gemv.py"))["my_gemv"]
    within_the_float_rule(run, dtype)
    strided = torch.randn(20, 12).to(dtype)
    y = run(strided.t()[:3, ::2], strided[:7, :10], strided[0, :7].float())
    torch.testing.assert_close(y, functional.linear(strided.t()[:3, ::2], strided[:7, :10], strided[0, :7]))
    assert run(strided[:0, :10], strided[:7, :10]).shape == (0, 7)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """gemv.hip compiled for the CPU, each of its threads as a thread."""
    folder = tmp_path_factory.mktemp("simt")
    (folder / "run.cpp").write_text(
        f'#define __HIP__\n#include "{EXAMPLES / "gemv.hip"}"\n'
        'extern "C" void run(int half, Place grid, Place block, void* x, void* w, void* b, void* y, int n, int k) {\n'
        "  launch(grid, block, [=] {\n"
        "    if (half) gemv_fp16((Fp16*)x, (Fp16*)w, (Fp16*)b, (Fp16*)y, n, k);\n"
        "    else gemv_bf16((Bf16*)x, (Bf16*)w, (Bf16*)b, (Bf16*)y, n, k);\n"
        "  });\n}\n"
    )
    command = [
        str(COMPILER),
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{SIMT}",
        "run.cpp",
        "-o",
        "run.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "run.so"))


class Place(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_form_for_gpus_emulated(dtype: torch.dtype, emulated: ctypes.CDLL) -> None:
    """The tail of K too, which the quick start that it comes from leaves out."""

    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=dtype)
        pointers = [ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (x, w, bias, y)]
        grid, block = Place(-(-w.shape[0] // 2), x.shape[0], 1), Place(32, 2, 1)
        emulated.run(int(dtype == torch.float16), grid, block, *pointers, *w.shape)
        return y

    within_the_float_rule(run, dtype)
    infinite = torch.tensor([[float("inf"), 1.0, float("nan")]], dtype=dtype)
    y = run(torch.ones(1, 3, dtype=dtype), infinite, None)
    assert y.isnan().all()


@needs_amd_clang
@pytest.mark.parametrize("arch", ARCHS)
def test_what_amds_compiler_makes_of_it(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No spills, loads of 16 bytes in the loop; the code object has both kernels."""
    monkeypatch.setenv("HIPCC", str(hipcc(tmp_path)))
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    kernels = runpy.run_path(str(EXAMPLES / "my_gemv.py"))["GPU"]
    one = kernels[torch.bfloat16]
    assert binary.read(one.compile(arch)).arch == arch
    assert set(one.kernels(arch)) == {"gemv_bf16", "gemv_fp16"}
    text = one.source(arch)
    used = resources.of_assembly(text)
    assert all(kernel.vector_spills == kernel.scalar_spills == kernel.scratch == 0 for kernel in used.values())
    assert all(kernel.registers <= 64 for kernel in used.values())
    assert len(re.findall(r"global_load_dwordx4", text)) >= 4


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_what_nvcc_makes_of_it() -> None:
    one = runpy.run_path(str(EXAMPLES / "my_gemv.py"))["GPU"][torch.bfloat16]
    assert set(one.kernels("sm_90")) == {"gemv_bf16", "gemv_fp16"}
    assert len(re.findall(r"ld\.global\S*v4\.", one.source("sm_90"))) >= 4


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make gate runs this")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_form_in_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's interpreter, where there is no GPU."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: make gate runs this")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run: Any = runpy.run_path(str(EXAMPLES / "my_gemv_triton.py"))["my_gemv_triton"]
    to = functools.partial(torch.Tensor.to, device=device)
    within_the_float_rule(lambda x, w, bias: run(to(x), to(w), None if bias is None else to(bias)).cpu(), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_form_for_gpus(dtype: torch.dtype) -> None:
    run = runpy.run_path(str(EXAMPLES / "my_gemv.py"))["my_gemv"]
    within_the_float_rule(lambda x, w, b: run(x.cuda(), w.cuda(), None if b is None else b.cuda()).cpu(), dtype)
