"""Compiles a kernel file of a user's for an arch, which need not be here, into the user's cache.

.hip, .cu   AMD: assembly (.s), then a code object (.co), by ROCm's clang.  NVIDIA: PTX (.ptx) or machine code
            (.cubin), by nvcc, or by NVRTC where there is no toolkit
.s          AMD: a code object
.cpp        a shared library (.so) of this machine, by the C++ compiler
.co, .ptx, .cubin   are loaded as they are
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from accelpatch.device import ARCHS
from accelpatch.errors import CacheError, KernelError
from accelpatch.kernels.compiling import binary, compiler, entries, nvrtc, targets
from accelpatch.kernels.compiling.source_file import SourceFile
from accelpatch.kernels.compiling.targets import Target

AMD, NVIDIA, CPU = "amd", "nvidia", "cpu"
DEVICE_SOURCES = (".hip", ".cu")
#: vendor -> endings of what its GPUs load, endings that are compiled to the first of these, and the text between
LOADED: Mapping[str, tuple[str, ...]] = {AMD: (".co",), NVIDIA: (".cubin", ".ptx"), CPU: (".so",)}
COMPILED: Mapping[str, tuple[str, ...]] = {AMD: (*DEVICE_SOURCES, ".s"), NVIDIA: DEVICE_SOURCES, CPU: (".cpp",)}
TEXT = {AMD: ".s", NVIDIA: ".ptx"}
ENDINGS = (*DEVICE_SOURCES, ".s", ".co", ".ptx", ".cubin", ".cpp")
_TOOLCHAINS: Mapping[str, Target] = {
    AMD: Target("", {}, ("amdclang++", "hipcc"), ("-std=c++17", "-O3"), (), "", "HIPCC", "install ROCm"),
    NVIDIA: Target("", {}, ("nvcc",), ("-std=c++17", "-O3"), (), "", "NVCC", targets.INSTALL_NVCC),
    CPU: replace(targets.CXX, flags=("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")),
}


def vendor_of(arch: str) -> str:
    """Whose an arch is: "gfx942" AMD's, "sm_90" NVIDIA's, "cpu" and a CPU's own. Raises KernelError for others."""
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", arch):
        return AMD
    if re.fullmatch(r"sm_[0-9]{2,3}[af]?", arch):
        return NVIDIA
    if arch == CPU or arch.startswith(("x86", "aarch")):
        return CPU
    raise KernelError(f"there is no arch {arch!r}; there are: {', '.join(ARCHS)}, cpu")


def loadable(source: SourceFile, arch: str) -> Path:
    """What a device of an arch loads of a kernel file: itself, or what it is compiled to.

    Raises KernelError: the arch takes no such file, there is no compiler, it fails (with its first lines), or the file
    was compiled for another arch.
    """
    vendor, ending = vendor_of(arch), source.path.suffix
    source.text()
    if ending in COMPILED[vendor]:
        return compiled(source, arch, LOADED[vendor][0])
    if ending not in LOADED[vendor]:
        raise KernelError(f"{source.path} is no file for {arch}, which takes {_listed(vendor)}")
    _check_arch(source.path, arch)
    return source.path


def text_of(source: SourceFile, arch: str) -> str:
    """The assembly (AMD) or PTX (NVIDIA) of a kernel file. Saved with that ending it can be edited, and is a kernel
    file itself. Raises as `loadable` does."""
    vendor = vendor_of(arch)
    form = TEXT.get(vendor)
    if source.path.suffix == form:
        return source.text()
    if form is None or source.path.suffix not in DEVICE_SOURCES:
        raise KernelError(f"{source.path} has no text for {arch}: assembly and PTX are made of .hip and .cu files")
    return compiled(source, arch, form).read_text()


def compiled(source: SourceFile, arch: str, form: str) -> Path:
    """A kernel file compiled to a form, an ending, from the cache if it is there. Raises as `loadable` does."""
    vendor = vendor_of(arch)
    if vendor == AMD and form == ".co" and source.path.suffix != ".s":
        return compiled(replace(source, path=compiled(source, arch, ".s"), options=()), arch, form)
    if source.path.suffix == ".s":
        _check_arch(source.path, arch)
    tools = replace(_TOOLCHAINS[vendor], arch=arch)
    path = targets.compiler(tools)
    if path is None:
        return _by_nvrtc(source, tools, form)
    flags = [*_flags(source, tools, form), *source.flags]

    def write(finished: Path) -> None:
        command = [path, *flags, str(source.path), "-o", str(finished)]
        compiler.run(command, f"correct {source.path}", first=True)

    return _kept(source, arch, form, repr((tools.flags, flags)), compiler.identity(path), write)


def _flags(source: SourceFile, tools: Target, form: str) -> list[str]:
    if tools.variable == "CXX":
        return list(tools.flags)
    if tools.variable == "NVCC":
        return ["-x", "cu", *tools.flags, f"-arch={tools.arch}", f"-{form[1:]}"]
    if form == ".co":
        return ["-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={tools.arch}"]
    return ["-x", "hip", *tools.flags, f"--offload-arch={tools.arch}", "--cuda-device-only", "-S"]


def _by_nvrtc(source: SourceFile, tools: Target, form: str) -> Path:
    """Compiled by NVRTC, where no nvcc is: for NVIDIA alone."""
    missing = targets.no_compiler(tools, f"set {tools.variable}")
    if tools.variable != "NVCC":
        raise KernelError(missing)
    if reason := nvrtc.why_not():
        raise KernelError(f"{missing}; nor is there NVRTC: {reason}")

    def write(finished: Path) -> None:
        finished.write_bytes(nvrtc.compiled(source, tools.arch, form))

    return _kept(source, tools.arch, form, "", nvrtc.identity(), write)


def _kept(
    source: SourceFile, arch: str, form: str, flags: str, identity: str, write: Callable[[Path], None]
) -> Path:  # fmt: skip
    made_of = hashlib.sha256(f"{source.digest()}\n{arch} {form} {flags}\n{identity}".encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9_]", "_", source.path.stem)[:60]
    try:
        return entries.finished(f"file_{name}-{arch}-{made_of[:24]}", f"kernel{form}", made_of, identity, write)
    except CacheError:
        raise
    except KernelError as error:
        raise KernelError(f"{source.path} was not compiled for {arch}: {error}") from error


def _check_arch(path: Path, arch: str) -> None:
    """Raise KernelError for a compiled file of another arch. PTX runs on later archs than its own."""
    found = binary.read(path, arch).arch
    number, wanted = (re.sub(r"\D", "", name) for name in (found, arch))
    alike = found.rstrip("af") == arch.rstrip("af") if vendor_of(arch) == NVIDIA else found == arch
    later = path.suffix == ".ptx" and found[-1].isdigit() and int(number) <= int(wanted)
    if not (alike or later):
        raise KernelError(f"{path} is for {found}, not for {arch}: compile its source for this GPU")


def is_c(path: Path) -> bool:
    """Whether a kernel file is C++, HIP's or CUDA's too."""
    return path.suffix in (*DEVICE_SOURCES, ".cpp")


def _listed(vendor: str) -> str:
    return ", ".join((*COMPILED[vendor], *LOADED[vendor]))


def copy(source: SourceFile, arch: str, to: Path) -> Path:
    """A copy of `loadable` at the path `to`, or in the folder `to` under the file's own name."""
    made = loadable(source, arch)
    into = to / f"{source.path.stem}-{arch}{made.suffix}" if to.is_dir() else to
    shutil.copyfile(made, into)
    return into
