"""Assembly for the emulator's tests: what clang makes of HIP sources, and kernels written by hand."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
COMPILERS = ("clang++-19", "llvm-as-19")
WHY_NOT = None if all(map(shutil.which, COMPILERS)) and Path("/usr/include/hip").exists() else "make gate installs it"

#: of tests that compile; with CI=true they fail instead
needs_clang = pytest.mark.skipif(
    WHY_NOT is not None and os.environ.get("CI") != "true", reason=f"no compiler for AMD: {WHY_NOT}"
)

#: gfx90a's code is mostly gfx942's
ARCH_CASES = [pytest.param("gfx90a", marks=pytest.mark.nightly), "gfx942"]


@functools.cache
def gate() -> ModuleType:
    """scripts/amd_gate.py, which knows the compilers' commands."""
    spec = importlib.util.spec_from_file_location("amd_gate", ROOT / "scripts/amd_gate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def command(arch: str) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="accelpatch-device-libraries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    wheels = ROOT / ".venv/gate"
    libraries = gate().device_libraries(folder, arch, gate().ARCHS[arch], wheels)
    return [*gate().compiler(arch, libraries, wheels), f"-I{gate().SOURCES}", "-S"]


@functools.cache
def compiled(arch: str, source: str, *flags: str) -> str:
    """Assembly of a HIP source (its text, or the path of a file of the project) for an arch."""
    with tempfile.TemporaryDirectory() as name:
        path = ROOT / source if source.endswith(".hip") else Path(name) / "source.hip"
        if not source.endswith(".hip"):
            path.write_text(source)
        out = Path(name) / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}.s"
        subprocess.run([*command(arch), *flags, str(path), "-o", str(out)], check=True)
        return out.read_text()


def kernel(code: str, arguments: str = "", arch: str = "gfx942", lds: int = 0, ids: int = 0) -> str:
    """A kernel `k` of handwritten code: s[0:1] has the address of its arguments, s2 the workgroup's number (x).

    arguments: sizes of the arguments, blanks between them; 8 are pointers. ids: axes that v0 has besides x.
    """
    offset, listed = 0, []
    for size in map(int, arguments.split()):
        offset = -(-offset // size) * size
        kind = "global_buffer" if size == 8 else "by_value"
        listed.append(f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: {kind}")
        offset += size
    return f"""\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
\t.text
k:
{code}
\ts_endpgm
\t.amdhsa_kernel k
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_kernarg_size {offset}
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_vgpr_workitem_id {ids}
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{chr(10).join(listed)}
    .kernarg_segment_size: {offset}
    .name: k
    .symbol: k.kd
amdhsa.version:
  - 1
...
\t.end_amdgpu_metadata
"""
