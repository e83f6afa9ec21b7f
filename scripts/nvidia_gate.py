"""Compiles every HIP kernel for NVIDIA GPUs other than Hopper, and says which of them spill. Needs nvcc, and no GPU.

    python scripts/nvidia_gate.py [--archs sm_80 sm_86 sm_89 sm_100 sm_120]

`make gate-all` runs it; two to three minutes of a core an arch. Says that the kernels compile, and nothing of what they
compute there or how fast. The exit status is 1 where one does not compile.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.device import ARCHS, KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import resources
from accelpatch.kernels.compiling.gpu_libraries import FUNCTIONS
from accelpatch.kernels.compiling.targets import target

DEFAULT = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
SHOWN = 5  # of the kernels that spill


def gate(arch: str) -> str:
    """Compile every source whole; a line about its kernels. Raises KernelError where one does not compile."""
    sources = [source for function in FUNCTIONS.values() for source in function.sources]
    began = time.perf_counter()
    found = resources.of_target(replace(target("gemv_bf16", KNOWN[arch]), sources=dict.fromkeys(sources, ())))
    shared, most = ARCHS[arch].block_shared, max(used.registers for used in found)
    assert all(used.shared <= shared for used in found), f"static shared memory above {shared}"
    spilled = sorted((used for used in found if used.vector_spills), key=lambda used: -used.vector_spills)
    lines = [f"{arch}: {len(found)} kernels, at most {most} registers, {len(spilled)} spill; "
             f"{time.perf_counter() - began:.0f} s"]  # fmt: skip
    lines += [f"    {used.vector_spills} registers of {used.kernel}" for used in spilled[:SHOWN]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", default=list(DEFAULT), choices=[name for name in KNOWN if "sm_" in name],
                        metavar="ARCH", help="The archs to compile for (default: %(default)s).")  # fmt: skip
    options = parser.parse_args()
    failed = 0
    for arch in options.archs:
        try:
            print(gate(arch), flush=True)
        except KernelError as error:
            failed += 1
            print(f"{arch}: FAILED: {error}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
