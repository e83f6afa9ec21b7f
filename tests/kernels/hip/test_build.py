"""The HIP library: for which GPUs there is one, what is said where there is none, and that nvcc builds it."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.build import libraries
from accelpatch.kernels.build.targets import compiler, target, unknown_arch

BUILT = [arch for arch, device in KNOWN.items() if unknown_arch(device) is None]
HERE = dataclasses.replace(KNOWN["sm_90"], index=0)
needs_nvcc = pytest.mark.skipif(compiler(target("hip", HERE)) is None, reason="needs nvcc")
SYMBOLS = (
    "accelpatch_gemv",
    "accelpatch_gemv_int8",
    "accelpatch_gemv_int4",
    "accelpatch_gemv_fp8",
    "accelpatch_gemv_compact",
    "accelpatch_unpack_compact",
    "accelpatch_int4_gemm",
    "accelpatch_decode_attention",
)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELPATCH_KERNELS", "NVCC", "HIPCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})


@pytest.mark.parametrize("arch", BUILT)
def test_every_known_arch_has_a_library_of_its_own(arch: str) -> None:
    made = target("hip", KNOWN[arch])
    assert made.arch == arch
    assert any(arch in flag for flag in made.flags)
    assert set(made.sources) == {path.name for path in made.home.glob("*.hip")}
    assert libraries.why_not("hip", KNOWN[arch]) is None, "a machine that is planned for has its own compiler"


def test_archs_and_compilers_have_keys_of_their_own() -> None:
    assert len({libraries.digest(target("hip", KNOWN[arch])) for arch in BUILT}) == len(BUILT) == 8


@pytest.mark.parametrize(
    "device, reason",
    [
        (probe("cpu"), "runs on a GPU"),
        (Device("cuda", "amd", "gfx1100", "a Radeon", 1 << 34, 32), "gfx90a, gfx942, gfx950, not for gfx1100"),
        (Device("cuda", "nvidia", "sm_75", "a T4", 1 << 34, 32), "sm_80 and later, not for sm_75"),
    ],
    ids=["cpu", "gfx1100", "sm_75"],
)
def test_devices_without_a_library(device: Device, reason: str) -> None:
    assert reason in str(libraries.why_not("hip", device))
    with pytest.raises(KernelError, match="no library 'hip'"):
        target("hip", device)


@pytest.mark.parametrize(
    "arch, names, advice", [("sm_90", "nvcc", "CUDA toolkit"), ("gfx942", "hipcc, amdclang++", "ROCm")]
)
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str, names: str, advice: str) -> None:
    monkeypatch.setattr("accelpatch.kernels.build.targets.compilers", dict)
    here = dataclasses.replace(KNOWN[arch], index=0)
    reason = str(libraries.why_not("hip", here))
    assert f"no compiler for {arch} here ({names})" in reason
    assert advice in reason
    with pytest.raises(KernelError, match=f"no compiler for {arch}"):
        libraries.library("hip", here)
    with pytest.raises(KernelError, match=f"no compiler for {arch}"):
        libraries.export("hip", KNOWN[arch], tmp_path)


@pytest.mark.parametrize("arch, variable", [("sm_90", "NVCC"), ("gfx942", "HIPCC")])
def test_a_named_compiler_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str, variable: str
) -> None:
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(variable, str(program))
    assert compiler(target("hip", KNOWN[arch])) == str(program)
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    assert f"{variable} names" in str(libraries.why_not("hip", dataclasses.replace(KNOWN[arch], index=0)))


def test_a_folder_of_libraries_without_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(tmp_path))
    assert "has no hip-sm_90" in str(libraries.why_not("hip", HERE))
    with pytest.raises(KernelError, match="has no hip-sm_90"):
        libraries.library("hip", HERE)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("source", target("hip", HERE).sources)
def test_nvcc_reads_every_source(source: str, tmp_path: Path) -> None:
    """Its front end alone, which instantiates every kernel."""
    made = target("hip", HERE)
    command = [str(compiler(made)), *made.flags, "-fdevice-syntax-only", "-c", source, "-o", str(tmp_path / "object")]
    done = subprocess.run(command, cwd=made.home, capture_output=True, text=True, timeout=300, check=False)
    if "Unknown option" in done.stderr:
        pytest.skip("this nvcc cannot check syntax alone")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@needs_nvcc
@pytest.mark.nightly
def test_nvcc_builds_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = libraries.export("hip", KNOWN["sm_90"], tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [libraries.LIBRARY, libraries.MANIFEST]
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    library = libraries.library("hip", HERE)
    assert all(isinstance(getattr(library, symbol), ctypes._CFuncPtr) for symbol in SYMBOLS)
