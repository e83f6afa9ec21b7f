"""Compiles Composable Kernel's instances for gfx90a, gfx942 and gfx950 without a GPU and reads the assembly.

    python scripts/ck_gate.py --wheels DIR [--all | --library NAME ...]

DIR holds the unpacked `triton` and `ziglang` wheels and the headers of CK that the `amd-aiter` wheel carries. Needs the
packages of amd_gate.py. `make gate` compiles one instance for each arch, `make gate-all` all of them, which takes half
an hour on two cores. Says nothing about speed or right results.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import amd_gate
from amd_gate import ARCHS, build, code_of, commands

from accelpatch.kernels.compiling import resources
from accelpatch.kernels.compiling.ck_libraries import CK_LIBRARIES, SOURCE
from accelpatch.kernels.compiling.occupancy import Resources

SOURCES = amd_gate.ROOT / "accelpatch/kernels/ck"
QUICK = ("ck_linear_i8_256x128",)
MEANT = {
    "gfx90a": r"v_mfma_i32_32x32x8i8",
    "gfx942": r"v_mfma_i32_32x32x16_i8",
    "gfx950": r"v_mfma_i32_32x32x32_i8",
}
WIDE = r"buffer_load_dwordx4"  # along K
LDS = 64 * 1024
#: most scalar registers that may be kept in lanes of a vector register; no memory is touched for them
SCALAR_SPILLS = {"scaled": 192, "any": 128}


def headers(wheels: Path) -> list[str]:
    """The flags for CK's headers and for newer ones of HIP than Debian's."""
    helper = next(wheels.rglob("ck_helper/ck/config.h")).parents[1]  # the configuration, filled in
    places = (next(wheels.rglob("backends/amd/include")), helper, helper.parent / "composable_kernel/include")
    return [f"-I{place}" for place in places]


def faults(arch: str, name: str, taken: Resources, code: str) -> list[str]:
    """What is wrong with a kernel of the library `name`."""
    bad = []
    if taken.vector_spills or taken.scratch:
        bad.append(f"{taken.vector_spills} vector registers spilled, {taken.scratch} bytes of scratch")
    most = max((count for part, count in SCALAR_SPILLS.items() if part in name.split("_")), default=0)
    if taken.scalar_spills > most:
        bad.append(f"{taken.scalar_spills} scalar registers spilled, at most {most}")
    if taken.shared > LDS:
        bad.append(f"{taken.shared} bytes of LDS, of {LDS}")
    meant = [MEANT[arch], *([] if name.endswith("_any") else [WIDE])]
    return bad + [f"no {one}" for one in meant if not re.search(one, code)]


def examine(arch: str, name: str, assembly: str) -> tuple[int, list[str]]:
    """How many kernels there are, and what is wrong with them. CK's kernels for wavefronts of 32 are empty."""
    lines, count = [], 0
    for kernel, taken in resources.of_assembly(assembly).items():
        if not taken.shared:
            continue
        count += 1
        lines += [f"{arch} {name}: {line}" for line in faults(arch, name, taken, code_of(kernel, assembly))]
        used = f"{taken.registers} VGPRs, {taken.scalar_spills} scalar spills, {taken.scratch} B of scratch"
        print(f"{arch} {name}: {used}, {taken.shared} B of LDS", flush=True)
    return count, lines if count == 2 else [*lines, f"{arch} {name}: {count} kernels, with and without a main loop"]


def compiled(names: Sequence[str], wheels: Path, folder: Path) -> tuple[int, list[str]]:
    """Kernels and faults of libraries for every arch, as many at a time as there are cores."""
    by_arch, include = commands(wheels, folder), headers(wheels)

    def one(job: tuple[str, str]) -> tuple[int, list[str]]:
        arch, name = job
        command = [*by_arch[arch], *include, *CK_LIBRARIES[name][SOURCE]]
        out = folder / f"{name}.{arch}"
        found = examine(arch, name, build(arch, SOURCES / SOURCE, command, wheels, out))
        for ending in ("s", "o", "so"):
            Path(f"{out}.{ending}").unlink()
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(one, [(arch, name) for name in names for arch in ARCHS]))
    return sum(count for count, _ in found), [line for _, lines in found for line in lines]


def main() -> int:
    """Compile, print what was found; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR",
                        help="The folder with the unpacked wheels of triton, ziglang and CK's headers.")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="Every instance, instead of one for each arch.")
    parser.add_argument("--library", action="append", choices=list(CK_LIBRARIES), metavar="NAME",
                        help="This instance instead, such as ck_scaled_bf16_64x128; repeatable.")  # fmt: skip
    options = parser.parse_args()
    names = tuple(CK_LIBRARIES) if options.all else options.library or QUICK
    with tempfile.TemporaryDirectory() as name:
        count, bad = compiled(names, options.wheels.resolve(), Path(name))
    print("\n".join([*bad, f"{count} kernels of Composable Kernel for {', '.join(ARCHS)}, {len(bad)} faults"]))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
