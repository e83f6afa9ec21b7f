"""What the libraries of device sources are made of: "cpu" for this machine's processor, "hip" for a GPU.

The HIP sources are one for all GPUs and make one library an arch: by nvcc for NVIDIA, by hipcc or amdclang++ for AMD. A
compiler builds for every arch that it knows, whether such a GPU is here or not.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelpatch.device import Device, compilers
from accelpatch.errors import KernelError


@dataclass(frozen=True)
class Target:
    """What a library is made of. sources: file in `folder` -> its own flags. compilers: names to look for, in order.

    variable: of the environment, names another compiler. install: what to do where there is none.
    """

    folder: str
    sources: Mapping[str, tuple[str, ...]]
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    link: tuple[str, ...]
    arch: str
    variable: str = "CXX"
    install: str = "install one, such as g++"

    @property
    def home(self) -> Path:
        """Where the sources lie."""
        return Path(__file__).parent / self.folder


_CXX = ("g++", "clang++", "c++")
_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_CPU = {"api.cpp": (), "thread_pool.cpp": (), "machine.cpp": (), "pack.cpp": (), "portable.cpp": (), "step.cpp": ()}
_X86 = {"avx2.cpp": _AVX2, "avx512.cpp": _AVX512}
_HIP: Mapping[str, tuple[str, ...]] = {
    "gemv.hip": (),
    "gemv_int8.hip": (),
    "gemv_int4.hip": (),
    "gemv_int4_32.hip": (),
    "gemv_int4_64.hip": (),
    "int4_gemm.hip": (),
    "gemv_fp8.hip": (),
    "gemv_compact.hip": (),
    "decode_attention.hip": (),
    "read_limit.hip": (),
}
_HIP_FLAGS = ("-std=c++17", "-O3")
_AMD = ("gfx90a", "gfx942", "gfx950")
_NVIDIA_FROM = 80  # bf16 matrix products and asynchronous copies


def target(name: str, device: Device) -> Target:
    """What the library `name` is made of for `device`. Raises KernelError for a name or device that has none."""
    if name == "cpu" and device.kind == "cpu":
        machine = platform.machine()
        sources = {**_CPU, **_X86} if machine in ("x86_64", "AMD64") else _CPU
        return Target("cpu", sources, _CXX, _CXX_FLAGS, ("-shared", "-pthread"), machine)
    if name == "hip" and unknown_arch(device) is None:
        return _nvidia(device.arch) if device.vendor == "nvidia" else _amd(device.arch)
    raise KernelError(f"there is no library {name!r} for {device.arch} ({device.kind}): the libraries are 'cpu', 'hip'")


def unknown_arch(device: Device) -> str | None:
    """Why the HIP sources make no library for a device of this arch; None where they do."""
    if device.kind != "cuda":
        return f"it runs on a GPU, not on {device.name}"
    if device.vendor == "amd":
        return None if device.arch in _AMD else f"it is made for {', '.join(_AMD)}, not for {device.arch}"
    number = device.arch.removeprefix("sm_")
    fits = number.isdigit() and int(number) >= _NVIDIA_FROM
    return None if fits else f"it is made for sm_{_NVIDIA_FROM} and later, not for {device.arch}"


def _nvidia(arch: str) -> Target:
    code = f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"
    flags = ("-x", "cu", *_HIP_FLAGS, "-Xcompiler", "-fPIC", code)
    return Target("hip", _HIP, ("nvcc",), flags, ("-shared", code), arch, "NVCC", "install the CUDA toolkit")


def _amd(arch: str) -> Target:
    code = f"--offload-arch={arch}"
    flags, link = ("-x", "hip", *_HIP_FLAGS, "-fPIC", code), ("--hip-link", "-shared", code)
    return Target("hip", _HIP, ("hipcc", "amdclang++"), flags, link, arch, "HIPCC", "install ROCm")


def compiler(made: Target) -> str | None:
    """The compiler to use: the one that $CXX (for a GPU $NVCC or $HIPCC) names, else the first of the target's that is
    in its toolkit ($CUDA_HOME, $ROCM_PATH, or where they usually lie) or on PATH; None where there is none."""
    if named := os.environ.get(made.variable):
        return shutil.which(named)
    found = compilers()
    return next((path for name in made.compilers if (path := found.get(name))), None)


def no_compiler(made: Target) -> str:
    """What to do where `compiler` gives None."""
    variable, named = made.variable, os.environ.get(made.variable)
    if named:
        return f"{variable} names {named!r}, which is not there: name a compiler that is, or unset {variable}"
    what = "C++ compiler" if variable == "CXX" else f"compiler for {made.arch}"
    names, otherwise = ", ".join(made.compilers), f"set {variable} or ACCELPATCH_KERNELS"
    return f"there is no {what} here ({names}): {made.install}, or {otherwise}"
