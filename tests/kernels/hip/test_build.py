"""The GPU libraries: for which GPUs there are some, what is said where there are none, and that nvcc builds them."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.compiler import including
from accelpatch.kernels.compiling.gpu_libraries import FUNCTIONS, GPU_LIBRARIES, library_of
from accelpatch.kernels.compiling.targets import compiler, names_of, target, unknown_arch

BUILT = [arch for arch, device in KNOWN.items() if unknown_arch(device) is None]
HERE = dataclasses.replace(KNOWN["sm_90"], index=0)
needs_nvcc = pytest.mark.skipif(compiler(target("gemv_bf16", HERE)) is None, reason="needs nvcc")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELPATCH_KERNELS", "NVCC", "HIPCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})


@pytest.mark.parametrize("arch", BUILT)
def test_every_known_arch_has_libraries_of_its_own(arch: str) -> None:
    every = [target(name, KNOWN[arch]) for name in names_of(KNOWN[arch])]
    assert all(made.arch == arch and any(arch in flag for flag in made.flags) for made in every)
    for home in {made.home for made in every}:  # Composable Kernel's is another
        used = {source for made in every if made.home == home for source in made.sources}
        assert used == {path.relative_to(home).as_posix() for path in home.rglob("*.hip")}
    assert libraries.why_not("gemv_bf16", KNOWN[arch]) is None, "a machine that is planned for has its own compiler"


def test_archs_and_libraries_have_keys_of_their_own() -> None:
    every = [libraries.digest(target(name, KNOWN[arch])) for arch in BUILT for name in names_of(KNOWN[arch])]
    assert len(set(every)) == len(every)
    assert len(BUILT) == 9


def test_amd_has_no_library_for_heads_wider_than_its_kernels_take() -> None:
    assert set(GPU_LIBRARIES) - set(names_of(KNOWN["gfx942"])) == {
        "decode_attention_bf16_256", "decode_attention_fp16_256", "decode_attention_int8_bf16_256",
        "decode_attention_fp8_bf16_256",
    }  # fmt: skip
    assert names_of(HERE) == list(GPU_LIBRARIES)


@pytest.mark.parametrize(
    "function, dtype, variant, name",
    [
        ("gemv", "bf16", "", "gemv_bf16"),
        ("gemv_int4_32", "fp16", "minimum", "gemv_int4_32_fp16_minimum"),
        ("decode_attention", "bf16", "128", "decode_attention_bf16_128"),
        ("gemv_compact", "bf16", "", "gemv_compact"),
        ("unpack_compact", "bf16", "", "gemv_compact"),
    ],
)
def test_the_library_of_a_function(function: str, dtype: str, variant: str, name: str) -> None:
    assert library_of(function, dtype, variant) == name
    assert name in GPU_LIBRARIES


def test_a_library_is_compiled_to_its_own_kernels_alone() -> None:
    assert GPU_LIBRARIES["decode_attention_fp16_64"] == dict.fromkeys(
        ("attention/decode_attention.hip", "attention/decode_attention_one.hip"), ("-DONLY_DTYPE=1", "-DONLY_FORM=64")
    )
    assert GPU_LIBRARIES["gemv_int4_bf16_zero_point"] == {"gemv/gemv_int4.hip": ("-DONLY_DTYPE=0", "-DONLY_FORM=1")}


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
    assert reason in str(libraries.why_not("gemv_bf16", device))
    with pytest.raises(KernelError, match="no library 'gemv_bf16'"):
        target("gemv_bf16", device)


@pytest.mark.parametrize(
    "arch, names, advice", [("sm_90", "nvcc", "CUDA toolkit"), ("gfx942", "hipcc, amdclang++", "ROCm")]
)
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str, names: str, advice: str) -> None:
    monkeypatch.setattr("accelpatch.kernels.compiling.targets.compilers", dict)
    here = dataclasses.replace(KNOWN[arch], index=0)
    reason = str(libraries.why_not("gemv_bf16", here))
    assert f"no compiler for {arch} here ({names})" in reason
    assert advice in reason
    with pytest.raises(KernelError, match=f"no compiler for {arch}"):
        libraries.library("gemv_bf16", here)
    with pytest.raises(KernelError, match=f"no compiler for {arch}"):
        libraries.export("gemv_bf16", KNOWN[arch], tmp_path)


@pytest.mark.parametrize("arch, variable", [("sm_90", "NVCC"), ("gfx942", "HIPCC")])
def test_a_named_compiler_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str, variable: str
) -> None:
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(variable, str(program))
    assert compiler(target("gemv_bf16", KNOWN[arch])) == str(program)
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    assert f"{variable} names" in str(libraries.why_not("gemv_bf16", dataclasses.replace(KNOWN[arch], index=0)))


def test_a_folder_of_libraries_without_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(tmp_path))
    assert "has no gemv_bf16-sm_90" in str(libraries.why_not("gemv_bf16", HERE))
    with pytest.raises(KernelError, match="has no gemv_bf16-sm_90"):
        libraries.library("gemv_bf16", HERE)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("source", sorted({source for sources in GPU_LIBRARIES.values() for source in sources}))
def test_nvcc_reads_every_source(source: str, tmp_path: Path) -> None:
    """Its front end alone, which instantiates every kernel."""
    made = target("gemv_bf16", HERE)
    command = [
        str(compiler(made)),
        *made.flags,
        *including(made),
        "-fdevice-syntax-only",
        "-c",
        source,
        "-o",
        str(tmp_path / "object"),
    ]
    done = subprocess.run(command, cwd=made.home, capture_output=True, text=True, timeout=300, check=False)
    if "Unknown option" in done.stderr:
        pytest.skip("this nvcc cannot check syntax alone")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@needs_nvcc
@pytest.mark.nightly
@pytest.mark.parametrize("name", GPU_LIBRARIES)
def test_nvcc_builds_every_library(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = libraries.export(name, KNOWN["sm_90"], tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [libraries.LIBRARY, libraries.MANIFEST]
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    library = libraries.library(name, HERE)
    function = max((one for one in FUNCTIONS if name.startswith(one)), key=len)
    symbol = {"read_limit": "read_all"}.get(function, function)
    assert isinstance(getattr(library, f"accelpatch_{symbol}"), ctypes._CFuncPtr)
