"""clang and the device libraries of a distribution, as the compiler of ROCm that $HIPCC names.

That clang does not know gfx950: for it the one of the Python package `ziglang` with the headers of `triton`, both where
`make gate` has put them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
RESOURCES = "/usr/lib/llvm-19/lib/clang/19"
CLANG = shutil.which("clang++-19")
GATE = Path(sys.prefix) / "gate"
ZIG = GATE / "ziglang/zig"
needs_amd_clang = pytest.mark.skipif(
    CLANG is None or not BITCODE.is_dir(), reason="needs clang-19 and rocm-device-libs: make gate installs both"
)
needs_zig = pytest.mark.skipif(not ZIG.is_file(), reason="needs clang 22 of ziglang: make gate installs it")
ARCHS = ("gfx90a", "gfx942", pytest.param("gfx950", marks=needs_zig))
#: device library that the distribution lacks -> the constant in it, and its value
LACKING = {
    "oclc_isa_version_942": ("ISA", 9402), "oclc_isa_version_950": ("ISA", 9500), "oclc_abi_version_600": ("ABI", 600),
}  # fmt: skip
CONSTANT = "@__oclc_{}_version = linkonce_odr hidden local_unnamed_addr addrspace(4) constant i32 {}\n"
SCRIPT = """#!/bin/sh
case " $* " in
*gfx950*assembler*|*assembler*gfx950*)
    eval out=\\${{$#}}
    {zig} clang "$@" -c && mv "$out" "$out.o" && exec {zig} ld.lld -shared --no-undefined "$out.o" -o "$out";;
*gfx950*)
    exec {zig} clang --rocm-path=/usr --rocm-device-lib-path={new} -resource-dir {resources} -I{include} \\
        --target=x86_64-linux-gnu -w "$@";;
*" -x hip "*)
    exec {clang} --rocm-path=/usr --rocm-device-lib-path={old} -w "$@";;
esac
exec {clang} -w "$@"
"""


def hipcc(folder: Path) -> Path:
    """A compiler for gfx90a, gfx942 and gfx950 in a folder."""
    for kind in ("old", "new"):
        _libraries(folder / kind)
    for name in ("ocml.bc", "ockl.bc"):
        (folder / "new" / name).unlink()
        (folder / "new" / name).symlink_to(GATE / "triton/backends/amd/lib" / name)
    script, include = folder / "hipcc", GATE / "triton/backends/amd/include"
    words = {"zig": ZIG, "clang": CLANG, "resources": RESOURCES, "include": include}
    script.write_text(SCRIPT.format(old=folder / "old", new=folder / "new", **words))
    script.chmod(0o755)
    return script


def _libraries(into: Path) -> None:
    """The distribution's device libraries, and those that it lacks."""
    into.mkdir(parents=True)
    for file in BITCODE.glob("*.bc"):
        (into / file.name).symlink_to(file)
    for name, constant in LACKING.items():
        made = str(into / f"{name}.bc")
        subprocess.run(["llvm-as-19", "-", "-o", made], input=CONSTANT.format(*constant), text=True, check=True)
