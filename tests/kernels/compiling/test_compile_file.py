"""Kernel files compiled: HIP to assembly and a code object, CUDA to PTX and a cubin, C++ to a library; the cache."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import ArgumentError, KernelError
from accelpatch.kernels.compiling import binary, compile_file, file_kernel, nvrtc, targets
from accelpatch.kernels.compiling.parameters import Parameter, declared
from accelpatch.kernels.compiling.source_file import SourceFile
from tests.support.amd_toolchain import hipcc, needs_amd_clang
from tests.support.fake_driver import machine

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
SOURCE = """
#ifdef __HIP__
#include <hip/hip_runtime.h>
#endif
#include "scale.h"
extern "C" __global__ void test_kernel(const float* q, const float* k, float* v, int n, float sm) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) v[i] = q[i] * k[i] * sm * SCALE;
}
__global__ void other(long long n, double d, short s, float* out) {
  extern __shared__ float memory[];
  memory[threadIdx.x] = d;
  __syncthreads();
  out[n] = memory[s];
}
"""
SIZES = {"test_kernel": [8, 8, 8, 4, 4], "_Z5otherxdsPf": [8, 8, 2, 8]}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a source with a header."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HIPCC", raising=False)
    (tmp_path / "file.hip").write_text(SOURCE)
    (tmp_path / "scale.h").write_text("#define SCALE 1.0f\n")
    return tmp_path


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hipcc(tmp_path_factory.mktemp("rocm"))


def test_kernel(q, k, v, n, sm): ...  # type: ignore[no-untyped-def]


test_kernel.__test__ = False  # type: ignore[attr-defined]


def kernel(file: Path, **given: Any) -> Any:
    return accelpatch.module(file, **given)(test_kernel)


def entries(place: Path) -> list[Path]:
    folder = place / "cache/kernels"
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []


def sizes(file: Path) -> dict[str, list[int]]:
    return {name: [one.size for one in found or ()] for name, found in binary.read(file).kernels.items()}


@needs_amd_clang
def test_hip_to_assembly_that_is_edited_and_loaded(place: Path, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU of AMD loads, compiled for one that is not here; then the edited assembly by the same decorator."""
    monkeypatch.setenv("HIPCC", str(rocm))
    made = kernel(place / "file.hip")
    text = made.source("gfx942")
    code = made.compile("gfx942")
    (place / "copy.s").write_text("; edited by hand\n" + text)
    assert len(entries(place)) == 2, "the assembly, and the code object that is made of it"
    assert sizes(code) == SIZES
    assert binary.read(code).arch == "gfx942"
    with machine("gfx942", monkeypatch) as gpu:
        gpu.number("count").value = 5
        edited, v = kernel(place / "copy.s"), torch.zeros(8)
        edited([2], [64], v, v, v, 8, 0.5)
        assert [gpu.value(at) for at in (0, 3)] == [v.data_ptr(), 8]
        assert gpu.value(4, ctypes.c_float) == 0.5
        with pytest.raises(ArgumentError, match=r"n is 1\.0, and the kernel's is an integer of 4 bytes"):
            made([2], [64], v, v, v, 1.0, 0.5)
    with machine("gfx90a", monkeypatch), pytest.raises(KernelError, match=r"copy\.s is for gfx942, not for gfx90a"):
        kernel(place / "copy.s")([2], [64], v, v, v, 8, 0.5)
    shutil.copy(code, place / "there.co")
    with machine("gfx90a", monkeypatch), pytest.raises(KernelError, match=r"there\.co is for gfx942, not for gfx90a"):
        kernel(place / "there.co")([2], [64], v, v, v, 8, 0.5)


@needs_nvcc
def test_cuda_to_ptx_that_is_edited_and_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(place / "file.hip", place / "file.cu")
    made = kernel(place / "file.cu")
    (place / "copy.ptx").write_text(made.source("sm_90"))
    assert sizes(place / "copy.ptx") == SIZES
    assert sizes(made.compile("sm_90")) == SIZES
    assert binary.read(made.compile("sm_80")).arch == "sm_80"
    assert made.compile("sm_90", to=place).name == "file-sm_90.cubin"
    v = torch.zeros(8)
    with machine("sm_90", monkeypatch) as gpu:
        gpu.number("count").value = 5
        for one in (kernel(place / "copy.ptx"), made, kernel(place / "file-sm_90.cubin")):
            one([2], [64], v, v, v, 8, 0.5)
            assert gpu.value(4, ctypes.c_float) == 0.5
    with machine("sm_100", monkeypatch) as gpu:
        kernel(place / "copy.ptx")([1], [1], v, v, v, 8, 0.5)  # PTX of an arch runs on later ones
        with pytest.raises(KernelError, match=r"file-sm_90\.cubin is for sm_90, not for sm_100"):
            kernel(place / "file-sm_90.cubin")([1], [1], v, v, v, 8, 0.5)


@needs_nvcc
def test_a_changed_header_compiles_it_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A HIP source is compiled by nvcc too, where it is made for both."""
    monkeypatch.setattr(file_kernel, "CHECK_EVERY", 0.0)
    made, v = kernel(place / "file.hip"), torch.zeros(8)
    with machine("sm_90", monkeypatch) as gpu:
        for text, loads in (("1.0f", 1), ("1.0f", 1), ("2.0f", 2)):
            (place / "scale.h").write_text(f"#define SCALE {text}\n")
            made([1], [1], v, v, v, 8, 0.5)
            assert gpu.number("loads").value == loads
    assert len(entries(place)) == 2


@needs_nvcc
def test_defines_options_and_folders_are_in_the_key(place: Path) -> None:
    (place / "more").mkdir()
    shutil.move(place / "scale.h", place / "more/scale.h")
    each: tuple[dict[str, Any], ...] = ({}, {"defines": {"A": 1}}, {"defines": {"A": None}}, {"options": ["-lineinfo"]})
    made = {kernel(place / "file.hip", include=[place / "more"], **more).compile("sm_90") for more in each}
    assert len(made) == 4
    assert kernel(place / "file.hip", include=[place / "more"], arch="sm_90a").compile("sm_90") in made


FAILING = {
    "sm_90": pytest.param("sm_90", r'(?s)file\.hip was not compiled for sm_90: .*file\.hip\(8\): error: .*"nothing"',
                          marks=needs_nvcc, id="nvcc"),
    "gfx90a": pytest.param("gfx90a", r"(?s)file\.hip was not compiled for gfx90a: .*file\.hip:8:.*error: .*'nothing'",
                           marks=needs_amd_clang, id="clang"),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "message"), list(FAILING.values()))
def test_a_file_that_does_not_compile_says_where(
    place: Path, rocm: Path, monkeypatch: pytest.MonkeyPatch, arch: str, message: str
) -> None:
    monkeypatch.setenv("HIPCC", str(rocm))
    (place / "file.hip").write_text(SOURCE.replace("* SCALE", "* nothing"))
    with pytest.raises(KernelError, match=message):
        kernel(place / "file.hip").compile(arch)
    assert entries(place) == []


def test_archs_and_files_that_do_not_go_together(place: Path) -> None:
    made = kernel(place / "file.hip")
    with pytest.raises(KernelError, match="there is no arch 'h100'; there are: gfx90a, "):
        made.compile("h100")
    with pytest.raises(KernelError, match=r"file\.hip is no file for cpu, which takes \.cpp, \.so"):
        made.compile("cpu")
    (place / "file.co").write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(KernelError, match=r"file\.co is no \.co file, or it is damaged"):
        kernel(place / "file.co").compile("gfx942")
    with pytest.raises(KernelError, match=r"file\.co is no file for sm_90"):
        kernel(place / "file.co").compile("sm_90")
    with pytest.raises(KernelError, match=r"file\.co has no text for gfx942"):
        kernel(place / "file.co").source("gfx942")


def test_without_a_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "compilers", dict)
    monkeypatch.setattr(nvrtc, "_library", lambda: None)
    monkeypatch.delenv("NVCC", raising=False)
    with pytest.raises(
        KernelError, match=r"no compiler for gfx942 here \(amdclang\+\+, hipcc\): install ROCm, or set HIPCC$"
    ):
        kernel(place / "file.hip").compile("gfx942")
    with pytest.raises(
        KernelError, match=r"no compiler for sm_90 here \(nvcc\): .*nor is there NVRTC: libnvrtc is not here"
    ):
        kernel(place / "file.hip").compile("sm_90")


def bundle(targets: dict[str, bytes]) -> bytes:
    """Code objects as `hipcc --genco` bundles them."""
    head, body, start = b"", b"", 4096
    for target, code in targets.items():
        name = f"hipv4-amdgcn-amd-amdhsa--{target}".encode()
        head += (start + len(body)).to_bytes(8, "little") + len(code).to_bytes(8, "little")
        head += len(name).to_bytes(8, "little") + name
        body += code
    head = binary.BUNDLE + len(targets).to_bytes(8, "little") + head
    return head.ljust(start, b"\0") + body


@needs_amd_clang
def test_a_bundle_of_code_objects(place: Path, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPCC", str(rocm))
    code = kernel(place / "file.hip").compile("gfx90a").read_bytes()
    (place / "bundle.co").write_bytes(bundle({"gfx90a:xnack-": code}))
    assert binary.read(place / "bundle.co", "gfx90a").arch == "gfx90a"
    v = torch.zeros(8)
    with machine("gfx90a", monkeypatch) as gpu:
        kernel(place / "bundle.co")([1], [1], v, v, v, 8, 0.5)
        assert gpu.number("launches").value == 1
    with machine("gfx942", monkeypatch), pytest.raises(KernelError, match=r"bundle\.co is for gfx90a, not for gfx942"):
        kernel(place / "bundle.co")([1], [1], v, v, v, 8, 0.5)


def test_an_included_file_is_found_as_a_compiler_does(place: Path) -> None:
    (place / "deep").mkdir()
    (place / "deep/one.h").write_text('#include "two.h"\n#include <vector>\n#include <far.h>\n')
    (place / "deep/two.h").write_text('  #  include "one.h" // a circle\n')
    (place / "far").mkdir()
    (place / "far/far.h").write_text("")
    (place / "file.hip").write_text('#include "deep/one.h"\n#include "missing.h"\n.include "scale.h"\n')
    source = SourceFile(place / "file.hip", include=(place / "far",))
    names = [file.name for file in source.files()]
    assert names[0] == "file.hip"
    assert sorted(names[1:]) == ["far.h", "one.h", "scale.h", "two.h"]


def test_what_a_kernel_declares() -> None:
    text = """
    // void f(int wrong)
    extern "C" __global__ void __launch_bounds__(256) f(const __half *__restrict__ x, unsigned long long n = 3, float,
        std::array<int, 2> pair, uint8_t flag, T other) {}
    void g() {}
    """
    assert declared(text, "f") == [
        Parameter("pointer", 8), Parameter("integer", 8, signed=False), Parameter("float", 4, signed=True),
        Parameter(), Parameter("integer", 1, signed=False), Parameter(),
    ]  # fmt: skip
    assert declared(text, "g") == []
    assert declared(text, "h") is None


def test_the_archs_of_vendors() -> None:
    names = ("gfx942", "gfx1100", "sm_90", "sm_90a", "sm_120", "cpu", "x86-64-avx512")
    assert [compile_file.vendor_of(name) for name in names] == ["amd"] * 2 + ["nvidia"] * 3 + ["cpu"] * 2


@pytest.mark.skipif(nvrtc.why_not() is not None, reason="needs NVRTC")
def test_nvrtc_compiles_where_there_is_no_nvcc(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "compilers", dict)
    monkeypatch.delenv("NVCC", raising=False)
    made = kernel(place / "file.hip")
    assert sizes(made.compile("sm_90")) == SIZES
    (place / "file.hip").write_text(SOURCE.replace("* SCALE", "* nothing"))
    with pytest.raises(KernelError, match=r'(?s)NVRTC .* failed:\n.*file\.hip\(8\): error: .*"nothing"'):
        made.compile("sm_90")


@needs_nvcc
def test_the_first_call_takes_the_compilers_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of nvcc, and one that asks for its version."""
    runs: list[Any] = []
    real = subprocess.run

    def counted(*given: Any, **more: Any) -> Any:
        runs.append(given)
        return real(*given, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    targets_found = kernel(place / "file.hip")
    targets_found.compile("sm_90")
    targets_found.compile("sm_90")
    assert len([one for one in runs if "-cubin" in one[0]]) == 1
    assert len(runs) <= 2
