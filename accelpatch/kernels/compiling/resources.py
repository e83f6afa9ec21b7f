"""Resources of each kernel in a library, read from the compilers' output: AMD assembly, NVIDIA's ptxas."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accelpatch.device import facts_of
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling.compiler import including
from accelpatch.kernels.compiling.occupancy import Resources
from accelpatch.kernels.compiling.targets import Target, compiler, missing

_FIELDS = {
    "registers": "vgpr_count",
    "vector_spills": "vgpr_spill_count",
    "scalar_spills": "sgpr_spill_count",
    "scratch": "private_segment_fixed_size",
    "shared": "group_segment_fixed_size",
    "threads": "max_flat_workgroup_size",
}


def of_assembly(assembly: str) -> dict[str, Resources]:
    """Kernels in AMD assembly, mangled name -> Resources, from the metadata at its end."""
    found = {}
    for entry in re.split(r"\n  - \.agpr_count", assembly[assembly.index("amdhsa.kernels:") :])[1:]:
        values = {field: int(_first(rf"\.{key}: +(\d+)", entry)) for field, key in _FIELDS.items()}
        name = _first(r"\.name: +(\S+)", entry)
        found[name] = Resources(name, **values)
    return found


def of_ptxas(said: str, ptx: str) -> dict[str, Resources]:
    """Kernels in the output of `ptxas -v`, mangled name -> Resources; block sizes come from the PTX."""
    found = {}
    for entry in said.split("Compiling entry function '")[1:]:
        name = entry.split("'", 1)[0]
        block = _first(rf"\.entry {re.escape(name)}\([^)]*\)\s*\.maxntid (\d+)", ptx)
        shared = re.search(r"(\d+) bytes smem", entry)
        found[name] = Resources(
            name,
            registers=int(_first(r"Used (\d+) registers", entry)),
            vector_spills=-(-int(_first(r"(\d+) bytes spill stores", entry)) // 4),
            scalar_spills=0,
            scratch=int(_first(r"(\d+) bytes stack frame", entry)),
            shared=int(shared[1]) if shared else 0,
            threads=int(block),
        )
    return found


def of_target(made: Target) -> list[Resources]:
    """Resources of a GPU library's kernels; compiles every source again. Raises KernelError as build.library does."""
    if reason := missing(made):
        raise KernelError(reason)
    path = str(compiler(made))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        each = pool.map(
            lambda source: _of_source(made, path, source, Path(folder) / source.replace("/", "-")), made.sources
        )
        found = [used for kernels in each for used in kernels.values()]
    names = demangled([used.kernel for used in found])
    return [Resources(**{**vars(used), "kernel": names[used.kernel]}) for used in found]


def _of_source(made: Target, path: str, source: str, into: Path) -> Mapping[str, Resources]:
    into.mkdir()
    command = [path, *made.flags, *including(made), *made.sources[source], str(made.home / source)]
    if (facts := facts_of(made.arch)) is not None and facts.vendor == "amd":
        _run([*command, "--cuda-device-only", "-S", "-o", str(into / "kernels.s")])
        return of_assembly((into / "kernels.s").read_text())
    said = _run([*command, "-cubin", "-Xptxas", "-v", "--keep", "--keep-dir", str(into), "-o", str(into / "cubin")])
    return of_ptxas(said, "\n".join(file.read_text() for file in into.glob("*.ptx")))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise KernelError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stderr


def demangled(names: Sequence[str]) -> dict[str, str]:
    """Mangled name -> readable name without arguments; unchanged where no demangler is found."""
    tool = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
    if tool is None:
        return {name: name for name in names}
    said = subprocess.run([tool, *names], capture_output=True, text=True, check=False).stdout.splitlines()
    plain = [re.sub(r"^void |\((?!.*\().*\)$", "", re.sub(r"\(int\)", "", line)) for line in said]
    return dict(zip(names, plain, strict=True))


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise KernelError(f"the compiler's words have no {pattern!r}: its version is one that this report cannot read")
    return str(found[1])
