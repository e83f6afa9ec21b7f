"""Holds the jit's instruction table to LLVM's assemblers, assembles every example for gfx90a, gfx942 and gfx950, and
holds the GEMV and the MFMA tile to what clang's HIP compiler makes of the same loops, by llvm-mca.

    python scripts/jit_gate.py --wheels DIR

DIR holds the unpacked `ziglang` wheel, whose clang knows gfx950; for the others llvm-mc-19, clang-19 and ld.lld-19 are
needed, and llvm-mca-19. `make gate` installs all that and runs this.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gates import jit_cycles
from gates.jit_assembly import ARCHS, refused, sample

from accelpatch.jit import table
from accelpatch.jit.assembler import Tools, assembled
from accelpatch.jit.kernel import Kernel
from accelpatch.jit.passes.matrix import matrix_passes

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples/jit"
#: kernel of an example -> values of its compile-time parameters
VALUES: dict[str, list[tuple[Any, ...]]] = {
    "kernel": [(32,)],
    "vector_add": [()],
    "rms_norm": [(4096, 1e-6), (300, 1e-6)],
    "gemv": [(4096,), (1002,), (77,)],
    "gemm": [("bf16", 4096, 4096), ("i8", 4096, 11008)],
}
_DEPENDENT = 4  # cycles that llvm-mca adds to the passes of a matrix instruction


def entries() -> list[table.Form]:
    return [table.parse(line) for several in table.lines().values() for line in several]


def faults_of_table(arch: str, wheels: Path) -> Iterator[str]:
    """Where the table and an arch's assembler differ."""
    forms = entries()
    bad = refused([sample(form) for form in forms], arch, wheels)
    for at, form in enumerate(forms):
        if (at not in bad) != (arch in form.archs):
            yield f"{arch}: {sample(form)}: " + (f"in the table, but {bad[at]}" if at in bad else "not in the table")


def faults_of_passes(arch: str) -> Iterator[str]:
    """Matrix instructions that take another number of passes than llvm-mca says."""
    forms = [form for form in entries() if form.unit == "matrix" and arch in form.archs]
    command = ["llvm-mca-19", "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-instruction-info", "-"]
    text = "".join(f"{sample(form)}\n" for form in forms)
    said = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    said = said.partition("Instruction Info:")[2].partition("\n\nResources:")[0]
    cycles = {name: int(latency) for latency, name in re.findall(r"^ +\d+ +(\d+) .*?(v_\w+)", said, re.M)}
    for form in forms:
        # LLVM prints the name of an arch's own spelling, so that aliases are not found.
        passes = matrix_passes(form.name, arch)
        if form.name in cycles and passes + _DEPENDENT != cycles[form.name]:
            yield f"{arch}: {form.name}: {passes} passes, by llvm-mca {cycles[form.name] - _DEPENDENT}"
    if len(cycles) < len(forms) / 3:
        yield f"{arch}: llvm-mca says how long {len(cycles)} of {len(forms)} matrix instructions take"


def tools(arch: str, wheels: Path) -> Tools:
    if arch != "gfx950":
        return Tools(("clang-19",), ("ld.lld-19",))
    zig = str(next(wheels.rglob("ziglang/zig")))
    return Tools((zig, "clang"), (zig, "ld.lld"))


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Every kernel of every example."""
    for path in sorted(EXAMPLES.glob("*.py")):
        for name, value in runpy.run_path(str(path)).items():
            if isinstance(value, Kernel):
                yield name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR", help="The folder with ziglang's wheel.")
    wheels = parser.parse_args().wheels.resolve()
    bad = [fault for arch in ARCHS for fault in faults_of_table(arch, wheels)]
    bad += [fault for arch in ARCHS[:2] for fault in faults_of_passes(arch)]
    built = 0
    for name, kernel in kernels():
        for values in VALUES[name]:
            for arch in ARCHS:
                assembled(kernel.source(arch, *values), arch, tools(arch, wheels))
                built += 1
    bad += jit_cycles.faults()
    print("\n".join(bad))
    print(f"{len(entries())} instructions of the jit, {built} kernels of its examples, {len(bad)} faults")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
