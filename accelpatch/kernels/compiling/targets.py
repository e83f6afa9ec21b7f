"""Sources, flags and compilers of the native libraries: "cpu" for the CPU, and GPU_LIBRARIES for GPUs.

The HIP sources are the same for all GPUs: nvcc compiles them for NVIDIA, hipcc or amdclang++ for AMD, each library for
one arch. CK_LIBRARIES are for AMD only, and need the headers of Composable Kernel. Libraries can be built for GPUs that
are not in this machine.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from accelpatch.device import ARCHS, Device, compilers, facts_of
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import ck_libraries
from accelpatch.kernels.compiling.ck_libraries import CK_LIBRARIES
from accelpatch.kernels.compiling.gpu_libraries import GPU_LIBRARIES, WIDTHS


@dataclass(frozen=True)
class Target:
    """How a library is made. sources: file in `folder` -> its own flags. compilers: names to search for, in order.

    variable: environment variable that names another compiler. install: advice where no compiler is found. include: a
    folder of other headers. lacks: why it cannot be built even with a compiler.
    """

    folder: str
    sources: Mapping[str, tuple[str, ...]]
    compilers: tuple[str, ...]
    flags: tuple[str, ...]
    link: tuple[str, ...]
    arch: str
    variable: str = "CXX"
    install: str = "install one, such as g++{command}"
    include: str | None = None
    lacks: str | None = None

    @property
    def home(self) -> Path:
        """The sources' folder."""
        return Path(__file__).parent.parent / self.folder


_CXX = ("g++", "clang++", "c++")
_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
CXX = Target("cpu", {}, _CXX, _CXX_FLAGS, ("-shared", "-pthread"), "")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_CPU: Mapping[str, tuple[str, ...]] = {
    "api.cpp": (),
    "thread_pool.cpp": (),
    "machine.cpp": (),
    "pack.cpp": (),
    "portable.cpp": (),
    "step.cpp": (),
}
_X86 = {"avx2.cpp": _AVX2, "avx512.cpp": _AVX512}
_ARM = {"dotprod.cpp": ("-march=armv8.2-a+dotprod",)}
_OF_MACHINE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": _X86,
    "AMD64": _X86,
    "aarch64": _ARM,
    "arm64": _ARM,
}
_HIP_FLAGS = ("-std=c++17", "-O3")
INSTALL_NVCC = "pip install nvidia-cuda-nvcc (beside a torch for CUDA 13), or install the CUDA toolkit"
#: package manager -> the command that installs g++; the folders of package managers, which PATH may lack
INSTALLERS = {
    "apt-get": "apt-get install g++", "dnf": "dnf install gcc-c++", "zypper": "zypper install gcc-c++",
    "apk": "apk add g++", "pacman": "pacman -S gcc",
}  # fmt: skip
PLACES = "/usr/bin:/bin:/usr/sbin:/sbin"
_MADE_FOR = ("mfma", "mma", "wgmma", "tcgen05")  # matrix instructions, with bf16


def target(name: str, device: Device) -> Target:
    """The Target of the library `name` for `device`. Raises KernelError where there is none."""
    if name == "cpu" and device.kind == "cpu":
        machine = platform.machine()
        sources = {**_CPU, **_OF_MACHINE.get(machine, {})}
        return replace(CXX, sources=sources, arch=machine)
    if name in GPU_LIBRARIES and unknown_arch(device) is None:
        made = _nvidia(device.arch) if device.vendor == "nvidia" else _amd(device.arch)
        return replace(made, sources=GPU_LIBRARIES[name])
    if name in CK_LIBRARIES and not_for_ck(device) is None:
        folder = ck_libraries.headers()
        made = replace(_amd(device.arch), folder="ck", sources=CK_LIBRARIES[name])
        return replace(made, include=str(folder)) if folder else replace(made, lacks=ck_libraries.NO_HEADERS)
    raise KernelError(f"there is no library {name!r} for {device.arch} ({device.kind})")


def names_of(device: Device) -> list[str]:
    """The names of the libraries that exist for a device. Raises KernelError where there are none."""
    if device.kind == "cpu":
        return ["cpu"]
    if reason := unknown_arch(device):
        raise KernelError(f"there are no libraries for {device.arch}: {reason}")
    if device.vendor == "nvidia":
        return list(GPU_LIBRARIES)
    # AMD's kernels take no wider heads; CK's libraries are listed only where its headers are found
    ck = CK_LIBRARIES if not_for_ck(device) is None and ck_libraries.headers() else ()
    return [*(name for name in GPU_LIBRARIES if not name.endswith(f"_{WIDTHS[-1]}")), *ck]


def not_for_ck(device: Device) -> str | None:
    """Why there is no library of Composable Kernel for a device; None where there is."""
    if device.kind == "cuda" and device.vendor == "amd" and device.facts is not None and device.facts.matrix == "mfma":
        return None
    where = device.arch if device.kind == "cuda" else device.name
    made_for = ", ".join(one.name for one in ARCHS.values() if one.matrix == "mfma")
    return f"Composable Kernel is for AMD Instinct ({made_for}), not for {where}"


def unknown_arch(device: Device) -> str | None:
    """Why the HIP sources cannot be built for a device's arch; None where they can."""
    if device.kind != "cuda":
        return f"it runs on a GPU, not on {device.name}"
    facts = device.facts
    if facts is not None and facts.matrix in _MADE_FOR:
        return None
    made_for = [one.name for one in ARCHS.values() if one.vendor == device.vendor and one.matrix in _MADE_FOR]
    names = ", ".join(made_for) if device.vendor == "amd" else f"{made_for[0]} and later"
    unit = "nothing is known of it" if facts is None else f"its matrix instructions are {facts.matrix}"
    return f"it is made for {names}, not for {device.arch}: {unit}"


def _nvidia(arch: str) -> Target:
    facts = facts_of(arch)
    assert facts is not None
    code = f"-gencode=arch=compute_{facts.number},code={facts.name}"
    flags = ("-x", "cu", *_HIP_FLAGS, "-Xcompiler", "-fPIC", code)
    return Target("hip", {}, ("nvcc",), flags, ("-shared", code), arch, "NVCC", INSTALL_NVCC)


def _amd(arch: str) -> Target:
    code = f"--offload-arch={arch}"
    flags, link = ("-x", "hip", *_HIP_FLAGS, "-fPIC", code), ("--hip-link", "-shared", code)
    return Target("hip", {}, ("hipcc", "amdclang++"), flags, link, arch, "HIPCC", "install ROCm")


def compiler(made: Target) -> str | None:
    """Path of the compiler: named by $CXX (for a GPU $NVCC or $HIPCC), else the first of the target's found in its
    toolkit ($CUDA_HOME, $ROCM_PATH, or the usual places) or on PATH; None where there is none."""
    if named := os.environ.get(made.variable):
        return shutil.which(named)
    found = compilers()
    return next((path for name in made.compilers if (path := found.get(name))), None)


def missing(made: Target) -> str | None:
    """Why a library cannot be built on this machine: no compiler, no headers. None where it can."""
    return made.lacks if compiler(made) else no_compiler(made)


def no_compiler(made: Target, otherwise: str = "") -> str:
    """The error message for a missing compiler, with advice. otherwise: what helps besides; default: for a library."""
    variable, named = made.variable, os.environ.get(made.variable)
    if named:
        return f"{variable} names {named!r}, which is not there: name a compiler that is, or unset {variable}"
    what = "C++ compiler" if variable == "CXX" else f"compiler for {made.arch}"
    names, otherwise = ", ".join(made.compilers), otherwise or f"set {variable} or ACCELPATCH_KERNELS"
    return f"there is no {what} here ({names}): {made.install.format(command=_command())}, or {otherwise}"


def _command() -> str:
    """The command that installs g++ on this system, in brackets; "" where its packages are not known."""
    for program, command in INSTALLERS.items():
        if shutil.which(program, path=PLACES):
            sudo = "" if os.geteuid() == 0 else "sudo "
            return f" (`{sudo}{command}`)"
    return ""
